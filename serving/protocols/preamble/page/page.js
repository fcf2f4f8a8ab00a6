// The web page of a server. It uses the public HTTP API through fetch, with the token of this tab
// if there is one. It polls every few seconds, so that it recovers from server restarts; while the
// page is hidden, it does not poll. This module shows the server's state, its load and its model.

import { showModel } from "./conversation.js";
import { $, bytes, compact, integer, newElement, sentence, setText } from "./elements.js";
import { deleteToken, getJson, readToken, saveToken } from "./requests.js";

const POLL_MS = 2000;
const SERVER_INFO_EVERY = 5; // Polls between two reads of /v1/server, which rarely changes.
const CHART_S = 180; // Time span of the chart.
const CHART_HEIGHT = 40;

let server = null; // The last /v1/server response; null: unknown, or no longer valid.
let polls = 0;
let pollTimer = 0;
let isPolling = false;
let isPollDue = false; // Whether a poll was requested during the poll in progress.
let lastLoad = null; // The previous load: {at (s), total (generated tokens)}.
const rates = []; // Samples of the chart: {at, rate}.

/** Polls now, or after the poll in progress: a slow server gets one poll at a time. */
async function poll() {
  clearTimeout(pollTimer);
  if (isPolling) {
    isPollDue = true;
    return;
  }
  isPolling = true;
  let wait = POLL_MS;
  try {
    if (server === null || polls % SERVER_INFO_EVERY === 0) showServer(await getJson("v1/server"));
    showLoad(await getJson("v1/load"));
    polls += 1;
  } catch (error) {
    wait = Math.max(wait, error.retryMs ?? 0);
    showError(error);
  } finally {
    isPolling = false;
  }
  if (isPollDue) {
    isPollDue = false;
    poll();
    return;
  }
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

// -------------------------------------------------------------------------------------- the model

const LIMITS = { kv_tokens_max: "KV cache", running_requests_max: "running requests" };

function showServer(info) {
  server = info;
  const { model, ledger } = info;
  document.title = `${model.name} – Preamble`;
  $("model").textContent = model.name;
  $("summary").textContent = `${compact(model.parameters)} parameters · ${model.dtype}`;
  fillList($("facts"), {
    "Other names": model.aliases.join(", "),
    Format: model.format,
    Shape: `${model.layers} layers, hidden size ${integer(model.hidden_size)}`,
    Tokenizer: model.tokenizer,
    Parallelism: parallelism(info),
    Digest: model.digest.slice(0, 12),
    Weights: bytes(ledger.weight_bytes),
    "KV cache": `${integer(ledger.kv_tokens)} tokens`,
    "Full-context requests": integer(ledger.full_context_requests),
    "Limited by": LIMITS[ledger.binding_limit] ?? ledger.binding_limit,
    "Adapter rows": integer(ledger.adapter_rows),
    Preamble: info.version,
  });
  $("context").textContent = `${integer(model.context_tokens_max)} tokens`;
  $("adapters").textContent = integer(info.adapters);
  showModel(info);
  showTokenForm(false);
  $("forget").hidden = !readToken();
}

/** Returns the parallel sizes that are greater than 1. */
function parallelism(info) {
  const sizes = [
    [info.tensor_parallel, "tensor"],
    [info.pipeline_parallel, "pipeline"],
    [info.expert_parallel, "expert"],
  ];
  const used = sizes.filter(([size]) => size > 1);
  return used.map(([size, name]) => `${size} ${name}`).join(" × ");
}

/** Shows names with their values; a name with an empty value is omitted. */
function fillList(list, values) {
  const shown = Object.entries(values).filter(([, value]) => value);
  const items = ([name, value]) => [newElement("dt", name), newElement("dd", value)];
  list.replaceChildren(...shown.flatMap(items));
}

// --------------------------------------------------------------------------------------- the load

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

/** Draws the token rates since CHART_S ago; before the first sample they count as zero. */
function drawChart(now) {
  const peak = Math.max(0, ...rates.map((sample) => sample.rate));
  const x = (at) => (CHART_S - (now - at)).toFixed(2);
  const y = (rate) => (CHART_HEIGHT * (1 - rate / (peak || 1))).toFixed(2);
  const start = x(rates[0]?.at ?? now);
  const points = [
    `0,${CHART_HEIGHT}`,
    `${start},${CHART_HEIGHT}`,
    ...rates.map(({ at, rate }) => `${x(at)},${y(rate)}`),
  ];
  const area = [...points, `${CHART_S},${CHART_HEIGHT}`];
  $("chart").replaceChildren(
    newSvgElement("polygon", { class: "area", points: area.join(" ") }),
    newSvgElement("polyline", { class: "trace", points: points.join(" ") }),
  );
  $("peak").textContent = peak ? `peak ${compact(peak)} tokens/s` : "no tokens";
  const summary = `${compact(rates.at(-1)?.rate ?? 0)} now, ${compact(peak)} at most`;
  $("chart").setAttribute("aria-label", `Tokens per second in the last three minutes: ${summary}`);
}

function newSvgElement(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// -------------------------------------------------------------------------------------- the token

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    const notice = "This is not a valid token: only printable ASCII without spaces is allowed.";
    setState("warn", "Token needed", notice);
    return;
  }
  saveToken(token);
  $("token").value = "";
  poll();
});
$("forget").addEventListener("click", () => {
  deleteToken();
  location.reload(); // Discards everything that the token gave access to.
});
document.addEventListener("visibilitychange", () => document.hidden || poll());
poll();
