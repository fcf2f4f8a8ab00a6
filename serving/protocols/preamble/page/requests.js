// Requests to the server's HTTP API, with the token of this tab, and the events of its streams.

const TIMEOUT_MS = 10_000;
const STREAM_ERROR = 500; // The status that an error within a stream has here.
const TOKEN_KEY = "preamble-token";

export const readToken = () => sessionStorage.getItem(TOKEN_KEY);
export const saveToken = (token) => sessionStorage.setItem(TOKEN_KEY, token);
export const deleteToken = () => sessionStorage.removeItem(TOKEN_KEY);

/** An error of the server, or with status 0 a lost connection. */
export class ResponseError extends Error {
  constructor(message, status = 0, retryMs = 0) {
    super(message);
    Object.assign(this, { status, retryMs });
  }
}

const connectionLost = () => new ResponseError("the connection to this server was lost");

/** Returns a successful response; otherwise throws the error message of the server. */
export async function request(path, options = {}) {
  const token = readToken();
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  const fixed = { cache: "no-store", credentials: "omit", redirect: "error" };
  const response = await fetch(path, { ...fixed, ...options, headers }).catch((error) => {
    throw options.signal?.aborted ? error : connectionLost();
  });
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error;
  const message = error?.message ?? `the server answers ${response.status} ${response.statusText}`;
  throw new ResponseError(
    message, response.status, Number(response.headers.get("Retry-After-Ms") ?? 0),
  );
}

export async function getJson(path, signal = AbortSignal.timeout(TIMEOUT_MS)) {
  return (await request(path, { signal })).json();
}

/** Yields the events of a completion's stream. */
export async function* readEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : connectionLost();
    });
    if (done) throw connectionLost(); // A complete stream ends with [DONE].
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (!lines.length) continue; // A comment, which keeps the connection open.
      const data = lines.map((line) => line.slice("data:".length).trimStart()).join("\n");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ResponseError(event.error.message, STREAM_ERROR);
      yield event;
    }
  }
}
