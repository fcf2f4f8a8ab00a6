// The web page of a server. It uses the public HTTP API through fetch, with the token of this
// tab if there is one, and inserts responses as text, never as HTML. It polls every few seconds,
// so that it recovers from server restarts; while the page is hidden, it does not poll.

const POLL_MS = 2000;
const SERVER_INFO_EVERY = 5; // Polls between two reads of /v1/server, which rarely changes.
const TIMEOUT_MS = 10_000;
const CHART_S = 180; // Time span of the chart.
const PAGE_SIZE = 50; // Adapters listed at a time.
const DEBOUNCE_MS = 150; // From the last keystroke to the search for adapters.
const RATE_MIN_MS = 20; // Shorter spans give no meaningful token rate.
// Interval at which new text is inserted. Each insertion lays out the whole answer again, so an
// insertion per token would block the page during a long and fast answer.
const REFRESH_MS = 50;
const TOKEN_KEY = "preamble-token";

const $ = (id) => document.getElementById(id);

function newElement(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Shows a text, or hides the element if the text is empty. */
function setText(element, text) {
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

// --------------------------------------------------------------------------------------- requests

class ResponseError extends Error {
  constructor(message, status = 0, code = "", retryMs = 0) {
    super(message);
    Object.assign(this, { status, code, retryMs });
  }
}

/** Returns a successful response; otherwise throws the error message of the server. */
async function request(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN_KEY);
  const headers = { ...options.headers };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(path, {
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    ...options,
    headers,
  });
  if (response.ok) return response;
  const error = (await response.json().catch(() => null))?.error;
  const message = error?.message ?? `the server answers ${response.status} ${response.statusText}`;
  const retryMs = Number(response.headers.get("Retry-After-Ms") ?? 0);
  throw new ResponseError(message, response.status, error?.code ?? "", retryMs);
}

async function getJson(path, signal = AbortSignal.timeout(TIMEOUT_MS)) {
  return (await request(path, { signal })).json();
}

// ------------------------------------------------------------------------- server state and load

let server = null; // The last /v1/server response; null: unknown, or no longer valid.
let polls = 0;
let pollTimer = 0;
let lastLoad = null; // The previous load: {at (s), total (generated tokens)}.
const rates = []; // Samples of the chart: {at, rate}.

async function poll() {
  clearTimeout(pollTimer);
  let wait = POLL_MS;
  try {
    if (server === null || polls % SERVER_INFO_EVERY === 0) showServer(await getJson("v1/server"));
    showLoad(await getJson("v1/load"));
    polls += 1;
  } catch (error) {
    wait = Math.max(wait, error.retryMs ?? 0);
    showError(error);
  }
  clearTimeout(pollTimer); // A concurrent poll may have set the timer.
  // While the token form is shown, each poll would be another rejected request.
  if (!document.hidden && $("access").hidden) pollTimer = setTimeout(poll, wait);
}

function setState(kind, word, notice = "") {
  $("state").dataset.state = kind;
  if ($("state").textContent !== word) $("state").textContent = word;
  setText($("notice"), notice);
}

/** Shows the token form if it is needed, else the page's content. */
function showTokenForm(needed) {
  $("access").hidden = !needed;
  document.body.classList.toggle("locked", needed);
}

function showError(error) {
  showTokenForm(error.status === 401 || error.status === 403);
  if (error.status === 429) return; // Rate limited: the next poll may succeed.
  server = lastLoad = null;
  for (const id of ["rate", "running", "waiting", "kv"]) $(id).textContent = "–";
  if (error.status === 401) setState("warn", "Token needed", sentence(error.message));
  else if (error.status === 403) setState("bad", "Not allowed", sentence(error.message));
  else if (error.status) setState("warn", "Not ready", sentence(error.message));
  else setState("bad", "Not reachable", "No answer from this server. The page keeps trying.");
}

function showServer(info) {
  server = info;
  const { model, ledger } = info;
  document.title = `${model.name} – Preamble`;
  $("model").textContent = model.name;
  const [tp, pp] = [info.tensor_parallel, info.pipeline_parallel];
  const ranks = tp * pp > 1 ? `${tp} tensor × ${pp} pipeline` : "one";
  $("summary").textContent = `${compact(model.parameters)} parameters, ${model.dtype}`;
  fillList($("facts"), [
    ["Format", model.format],
    ["Shape", `${model.layers} layers, hidden size ${integer(model.hidden_size)}`],
    ["Context", `${integer(model.context_tokens_max)} tokens`],
    ["Tokenizer", model.tokenizer],
    ["Digest", model.digest.slice(0, 12) || "not computed"],
    ["Adapters", integer(info.adapters)],
    ["Ranks", ranks],
    ["Data type", model.dtype],
    ["Preamble", info.version],
  ]);
  fillList($("memory"), [
    ["Weights", bytes(ledger.weight_bytes)],
    ["KV cache", `${integer(ledger.kv_tokens)} tokens`],
    ["Full-context requests", integer(ledger.full_context_requests)],
    ["Adapter rows on the device", integer(ledger.adapter_rows)],
    ["Limited first by", ledger.binding_limit],
  ]);
  updateMaxTokens();
  updateCommand();
  showTokenForm(false);
  $("forget").hidden = !sessionStorage.getItem(TOKEN_KEY);
}

function fillList(list, pairs) {
  const items = ([name, value]) => [newElement("dt", name), newElement("dd", value)];
  list.replaceChildren(...pairs.flatMap(items));
}

function showLoad(load) {
  const at = performance.now() / 1000;
  const total = Number(load.generated_tokens);
  // A lower count than before means that the ranks were restarted.
  const comparable = lastLoad !== null && total >= lastLoad.total;
  const rate = comparable ? (total - lastLoad.total) / (at - lastLoad.at) : 0;
  lastLoad = { at, total };
  if (comparable) rates.push({ at, rate });
  while (rates[0]?.at < at - CHART_S) rates.shift();
  const used = Number(load.kv_blocks_held) / Math.max(1, Number(load.kv_blocks));
  $("rate").textContent = comparable ? compact(rate) : "–";
  $("running").textContent = integer(load.running_requests);
  $("waiting").textContent = integer(load.waiting_requests);
  $("kv").textContent = used.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 });
  drawChart(at);
  if (server.state === "SERVER_STATE_DRAINING") {
    setState("warn", "Draining", "The server finishes accepted requests and rejects new ones.");
  } else if (!load.engine_up) {
    setState("warn", "Not ready", "The ranks were lost. The server restarts them if it can.");
  } else setState("good", "Ready");
}

function drawChart(now) {
  const [width, height] = [CHART_S, 60];
  const top = roundUp(Math.max(10, ...rates.map((sample) => sample.rate)));
  const x = (at) => (width - (now - at)).toFixed(2);
  const points = rates.map(({ at, rate }) => `${x(at)},${(height * (1 - rate / top)).toFixed(2)}`);
  const gridLine = (y) => newSvgElement("line", { x1: 0, x2: width, y1: y, y2: y });
  const area = [`${x(rates[0]?.at ?? now)},${height}`, ...points, `${width},${height}`];
  $("chart").replaceChildren(
    newSvgElement("polygon", { class: "area", points: area.join(" ") }),
    ...[0, height / 2, height].map(gridLine),
    newSvgElement("polyline", { class: "trace", points: points.join(" ") }),
  );
  $("most").textContent = `${integer(top)} tokens/s`;
  const peak = Math.max(0, ...rates.map((sample) => sample.rate));
  const summary = `${compact(rates.at(-1)?.rate ?? 0)} now, ${compact(peak)} at most`;
  $("chart").setAttribute("aria-label", `Tokens per second in the last three minutes: ${summary}`);
}

function newSvgElement(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// ------------------------------------------------------------------------------------- formatting

const integer = (value) => Number(value).toLocaleString("en");

function compact(value) {
  const number = Number(value);
  const notation = number < 10_000 ? "standard" : "compact";
  const digits = { maximumSignificantDigits: number < 100 ? 2 : 3 };
  return number.toLocaleString("en", { notation, ...digits });
}

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, Number(value))) / 10));
  return `${(Number(value) / 1024 ** power).toFixed(power > 1 ? 1 : 0)} ${units[power]}`;
}

const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

/** Rounds up to 1, 2 or 5 times a power of ten. */
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 5, 10].find((step) => step * unit >= value);
}

/** Adds the capital and the full stop that the server's error messages lack. */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;

// --------------------------------------------------------------------------------- adapter picker

let adapter = null; // The selected adapter's record; null: none.
let choices = []; // The listed choices: {name, about, choose}.
let active = -1; // Index of the highlighted choice.
let searching = null; // AbortController of the running search.
let searchTimer = 0;

const adapterName = (record) => (record.current ? record.name : `${record.name}@${record.version}`);

function describe(record) {
  const size = `${record.virtual_tokens} virtual tokens`;
  const parts = [record.task, record.method, size, `version ${record.version}`];
  return parts.filter(Boolean).join(" · ");
}

async function search(contains, pageToken = "", previous = []) {
  searching?.abort();
  const controller = (searching = new AbortController());
  const query = new URLSearchParams({ page_size: PAGE_SIZE, contains, page_token: pageToken });
  try {
    const page = await getJson(`v1/adapters?${query}`, controller.signal);
    showAdapters(contains, [...previous, ...page.adapters], page.next_page_token);
  } catch (error) {
    if (controller.signal.aborted) return;
    const message = error.status ? sentence(error.message) : "No answer from this server.";
    showChoices([{ name: message }]);
  }
}

function showAdapters(contains, records, nextPageToken) {
  const choice = (name, about, record) => ({ name, about, choose: () => selectAdapter(record) });
  const listed = records.map((record) =>
    choice(adapterName(record), record.task || describe(record), record));
  if (!contains) listed.unshift(choice("None", "the model itself", null));
  const empty = contains ? "No adapter's name contains this text." : "There are no adapters.";
  if (!records.length) listed.push({ name: empty });
  const more = async () => {
    await search(contains, nextPageToken, records);
    activate(listed.length - 1); // The first of the new records, which replaces "More".
  };
  const hint = `${integer(records.length)} are listed; type to search`;
  if (nextPageToken) listed.push({ name: "More …", about: hint, choose: more });
  showChoices(listed);
}

function showChoices(listed) {
  choices = listed;
  $("choices").replaceChildren(...choices.map(({ name, about, choose }, index) => {
    const item = newElement("li", "", { role: "option", id: `choice-${index}` });
    item.setAttribute("aria-selected", "false");
    item.append(newElement("span", name));
    if (about) item.append(newElement("span", about, { class: "hint" }));
    if (!choose) item.setAttribute("aria-disabled", "true");
    return item;
  }));
  $("choices").hidden = false;
  $("adapter").setAttribute("aria-expanded", "true");
  activate(choices.findIndex((choice) => choice.choose));
}

function activate(index) {
  $("choices").children[active]?.setAttribute("aria-selected", "false");
  active = index;
  const item = $("choices").children[index];
  item?.setAttribute("aria-selected", "true");
  item?.scrollIntoView({ block: "nearest" });
  if (item) $("adapter").setAttribute("aria-activedescendant", item.id);
  else $("adapter").removeAttribute("aria-activedescendant");
}

function closeChoices() {
  searching?.abort();
  clearTimeout(searchTimer);
  $("choices").hidden = true;
  $("adapter").setAttribute("aria-expanded", "false");
  $("adapter").removeAttribute("aria-activedescendant");
  $("adapter").value = adapter ? adapterName(adapter) : "";
}

function selectAdapter(record) {
  adapter = record;
  $("adapter-about").textContent = record ? describe(record) : "";
  updateMaxTokens();
  closeChoices();
  showFields(record?.input_fields ?? []);
  updateCommand();
}

/** Shows the default of "Max tokens": the adapter's, else the server's. */
function updateMaxTokens() {
  const tokens = adapter?.max_new_tokens || server?.limits.new_tokens_default;
  $("max-tokens").placeholder = tokens ? integer(tokens) : "";
}

const choicesShown = () => !$("choices").hidden;

$("adapter").addEventListener("input", () => {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => search($("adapter").value.trim()), DEBOUNCE_MS);
});
$("adapter").addEventListener("click", () => choicesShown() || ($("adapter").select(), search("")));
$("adapter").addEventListener("blur", closeChoices);
$("adapter").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const enter = event.key === "Enter" && choicesShown() && !event.ctrlKey && !event.metaKey;
  if (step && choicesShown()) activate((active + step + choices.length) % choices.length);
  else if (step) search("");
  else if (enter) choices[active]?.choose?.();
  else if (event.key === "Escape" && choicesShown()) closeChoices();
  else return;
  event.preventDefault();
  event.stopPropagation();
});
$("choices").addEventListener("mousedown", (event) => {
  event.preventDefault(); // Keeps the focus in the input.
  const item = event.target.closest("li");
  if (item) choices[[...$("choices").children].indexOf(item)].choose?.();
});

// ------------------------------------------------------------------------------ prompt and answer

const textareas = () => [...$("fields").querySelectorAll("textarea")];

/** Shows one text area for the prompt, or one for each field of the adapter's prompt template. */
function showFields(fieldNames) {
  const texts = new Map(textareas().map((area) => [area.name, area.value]));
  const names = fieldNames.length ? fieldNames : [""];
  $("fields").replaceChildren(...names.map((name, index) => {
    const field = newElement("div", "", { class: "field" });
    const rows = fieldNames.length > 1 ? 3 : 5;
    const area = newElement("textarea", "", { id: `field-${index}`, name, rows });
    area.value = texts.get(name) ?? (index === 0 ? [...texts.values()][0] ?? "" : "");
    field.append(newElement("label", name || "Prompt", { for: area.id }), area);
    return field;
  }));
}

let running = null; // AbortController of the running completion.

async function run() {
  if (running || !$("ask").reportValidity()) return;
  running = new AbortController();
  const view = new AnswerView();
  try {
    const response = await request("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    for await (const event of readEvents(response.body)) view.append(event);
    view.finish();
  } catch (error) {
    if (running.signal.aborted) view.finish("stopped");
    else if (error instanceof ResponseError) view.finish("refused", sentence(error.message));
    else view.finish("broken off", "The connection to this server was lost.");
  } finally {
    running = null;
    $("stop").hidden = true;
    $("run").disabled = false;
  }
}

function requestBody() {
  const body = adapter?.input_fields.length
    ? { inputs: Object.fromEntries(textareas().map((area) => [area.name, area.value])) }
    : { prompt: textareas()[0].value };
  if (adapter) body.model = adapterName(adapter);
  const tokens = $("max-tokens").value || (adapter ? "" : server?.limits.new_tokens_default);
  if (tokens) body.max_tokens = Number(tokens);
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  return { ...body, temperature: Number($("temperature").value), stream: true, stream_options };
}

/** Shows a curl command that sends the request of the form, without streaming. */
function updateCommand() {
  const { stream, stream_options, ...body } = requestBody();
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const token = sessionStorage.getItem(TOKEN_KEY) ? [`-H "authorization: Bearer $TOKEN"`] : [];
  const words = [
    `curl ${quoted(new URL("v1/completions", document.baseURI).href)}`,
    ...token,
    "-H 'content-type: application/json'",
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  $("command").textContent = words.join(" \\\n  ");
}

/** Yields the records of a stream of server-sent events. */
async function* readEvents(stream) {
  let buffer = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ResponseError("the stream ended before the completion was finished");
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ResponseError(event.error.message);
      yield event;
    }
  }
}

/** Shows one streamed completion and its timings. */
class AnswerView {
  constructor() {
    this.began = performance.now();
    this.first = this.last = this.count = this.firstCount = 0;
    this.reason = "";
    this.newText = ""; // Received, but not yet inserted.
    this.refreshTimer = 0;
    for (const id of ["answer", "end"]) $(id).textContent = "";
    for (const id of ["first-token", "made", "speed"]) $(id).textContent = "–";
    setText($("failure"), "");
    $("answering").hidden = $("stop").hidden = false;
    $("run").disabled = true;
    $("answer").classList.add("running");
  }

  append({ choices: [choice], usage }) {
    this.newText += choice?.text ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    const count = usage?.completion_tokens ?? this.count;
    if (count !== this.count) {
      this.last = performance.now();
      if (!this.first) [this.first, this.firstCount] = [this.last, count];
      this.count = count;
    }
    this.refreshTimer ||= setTimeout(() => this.refresh(), REFRESH_MS);
  }

  /** Inserts the new text and shows the timings so far. */
  refresh() {
    clearTimeout(this.refreshTimer);
    this.refreshTimer = 0;
    const box = $("answer");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (this.newText) box.append(this.newText);
    this.newText = "";
    if (atEnd) box.scrollTop = box.scrollHeight;
    if (!this.first) return;
    const ms = this.last - this.first;
    $("first-token").textContent = seconds(this.first - this.began);
    $("made").textContent = integer(this.count);
    const rate = (1000 * (this.count - this.firstCount)) / ms;
    $("speed").textContent = ms >= RATE_MIN_MS ? compact(rate) : "–";
  }

  finish(outcome = "", failure = "") {
    this.refresh();
    const reasons = { stop: "complete", length: "at max tokens" };
    $("answer").classList.remove("running");
    $("end").textContent = outcome || (reasons[this.reason] ?? this.reason);
    setText($("failure"), failure);
  }
}

$("ask").addEventListener("input", updateCommand);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", () => {
  running?.abort();
  $("run").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  if ($("ask").contains(event.target)) run();
});

// ------------------------------------------------------------------------------------- token form

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    const notice = "This is not a valid token: only printable ASCII without spaces is allowed.";
    setState("warn", "Token needed", notice);
    return;
  }
  sessionStorage.setItem(TOKEN_KEY, token);
  $("token").value = "";
  poll();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN_KEY);
  location.reload(); // Discards everything that the token gave access to.
});
document.addEventListener("visibilitychange", () => document.hidden || poll());

if (navigator.platform.startsWith("Mac")) document.querySelector("kbd").textContent = "⌘ Enter";
showFields([]);
poll();
