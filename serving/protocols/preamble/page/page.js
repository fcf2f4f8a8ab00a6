// The page of a server, for a person. It asks by fetch what any client can ask, with the token of
// this tab if there is one, and puts what comes into the page as text, never as HTML. It asks again
// every few seconds, so it outlives restarts of the server; hidden, it asks nothing.

const LOOK_MS = 2000;
const MEET_EVERY = 5; // Looks from one to the next at what changes seldom.
const PATIENCE_MS = 10_000;
const WINDOW_S = 180; // What the chart shows.
const PAGE = 50; // Adapters that are listed at a time.
const TYPING_MS = 150;
const FEW_MS = 20; // Too few to say how fast tokens came.
const TOKEN = "preamble-token";

const $ = (id) => document.getElementById(id);

function made(kind, text = "", attributes = {}) {
  const element = document.createElement(kind);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function say(element, text) {
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

// ------------------------------------------------------------------------------------- the server

class Refused extends Error {
  constructor(message, status = 0, code = "", retryMs = 0) {
    super(message);
    Object.assign(this, { status, code, retryMs });
  }
}

/** A response that is good; otherwise the server's own sentence is thrown. */
async function asked(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
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
  const said = (await response.json().catch(() => null))?.error;
  const message = said?.message ?? `the server answers ${response.status} ${response.statusText}`;
  const retryMs = Number(response.headers.get("Retry-After-Ms") ?? 0);
  throw new Refused(message, response.status, said?.code ?? "", retryMs);
}

async function got(path, signal = AbortSignal.timeout(PATIENCE_MS)) {
  return (await asked(path, { signal })).json();
}

// ----------------------------------------------------------------------------- how it is, and load

let server = null; // What it last said of itself; null: it is not known, or not any more.
let looks = 0;
let timer = 0;
let before = null; // The last load, and when it was.
const rates = []; // {at, rate}, of the last minutes.

async function look() {
  clearTimeout(timer);
  let wait = LOOK_MS;
  try {
    if (server === null || looks % MEET_EVERY === 0) meet(await got("v1/server"));
    show(await got("v1/load"));
    looks += 1;
  } catch (error) {
    wait = Math.max(wait, error.retryMs ?? 0);
    trouble(error);
  }
  clearTimeout(timer); // Of another look that ended meanwhile.
  // Without a token there is nothing to see, and each look would be a refusal more.
  if (!document.hidden && $("access").hidden) timer = setTimeout(look, wait);
}

function state(kind, word, sentence = "") {
  $("state").dataset.state = kind;
  if ($("state").textContent !== word) $("state").textContent = word;
  say($("notice"), sentence);
}

/** Whether there is nothing to do here without a token, or with this one. */
function enter(needed) {
  $("access").hidden = !needed;
  document.body.classList.toggle("locked", needed);
}

function trouble(error) {
  const entering = error.status === 401 || error.status === 403;
  enter(entering);
  if (error.status === 429) return; // Only this look was too many.
  server = before = null;
  for (const id of ["rate", "running", "waiting", "kv"]) $(id).textContent = "–";
  if (error.status === 401) state("warn", "Token needed", sentence(error.message));
  else if (error.status === 403) state("bad", "Not allowed", sentence(error.message));
  else if (error.status) state("warn", "Not ready", sentence(error.message));
  else state("bad", "Not reachable", "No answer from this server. It is asked again and again.");
}

function meet(info) {
  server = info;
  const { model, ledger } = info;
  document.title = `${model.name} – Preamble`;
  $("model").textContent = model.name;
  const [tensor, stages] = [info.tensor_parallel, info.pipeline_parallel];
  const ranks = tensor * stages > 1 ? `${tensor} tensor × ${stages} pipeline` : "one";
  $("summary").textContent = `${short(model.parameters)} parameters, ${model.dtype}`;
  list($("facts"), [
    ["Format", model.format],
    ["Shape", `${model.layers} layers, ${whole(model.hidden_size)} wide`],
    ["Context", `${whole(model.context_tokens_max)} tokens`],
    ["Tokenizer", model.tokenizer],
    ["Digest", model.digest.slice(0, 12) || "not computed"],
    ["Adapters", whole(info.adapters)],
    ["Ranks", ranks],
    ["Computes in", model.dtype],
    ["Preamble", info.version],
  ]);
  list($("memory"), [
    ["Weights", bytes(ledger.weight_bytes)],
    ["KV memory", `${whole(ledger.kv_tokens)} tokens`],
    ["Full-context requests", whole(ledger.full_context_requests)],
    ["Adapter rows at once", whole(ledger.adapter_rows)],
    ["Binds first", ledger.binding_limit],
  ]);
  bound();
  command();
  enter(false);
  $("forget").hidden = !sessionStorage.getItem(TOKEN);
}

function list(place, pairs) {
  place.replaceChildren(...pairs.flatMap(([name, value]) => [made("dt", name), made("dd", value)]));
}

function show(load) {
  const at = performance.now() / 1000;
  const total = Number(load.generated_tokens);
  // Another count than before begins after a restart.
  const known = before !== null && total >= before.total;
  const rate = known ? (total - before.total) / (at - before.at) : 0;
  before = { at, total };
  if (known) rates.push({ at, rate });
  while (rates[0]?.at < at - WINDOW_S) rates.shift();
  const used = Number(load.kv_blocks_held) / Math.max(1, Number(load.kv_blocks));
  $("rate").textContent = known ? short(rate) : "–";
  $("running").textContent = whole(load.running_requests);
  $("waiting").textContent = whole(load.waiting_requests);
  $("kv").textContent = used.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 });
  draw(at);
  if (server.state === "SERVER_STATE_DRAINING") {
    state("warn", "Draining", "It finishes what it has, and takes no more.");
  } else if (!load.engine_up) {
    state("warn", "Not ready", "The ranks are lost. If they can be, they are started again.");
  } else state("good", "Ready");
}

function draw(now) {
  const [width, height] = [WINDOW_S, 60];
  const most = rounded(Math.max(10, ...rates.map((one) => one.rate)));
  const x = (at) => (width - (now - at)).toFixed(2);
  const points = rates.map(({ at, rate }) => `${x(at)},${(height * (1 - rate / most)).toFixed(2)}`);
  const under = [`${x(rates[0]?.at ?? now)},${height}`, ...points, `${width},${height}`];
  $("chart").replaceChildren(
    drawn("polygon", { class: "area", points: under.join(" ") }),
    ...[0, height / 2, height].map((y) => drawn("line", { x1: 0, x2: width, y1: y, y2: y })),
    drawn("polyline", { class: "trace", points: points.join(" ") }),
  );
  $("most").textContent = `${whole(most)} tokens/s`;
  const peak = Math.max(0, ...rates.map((one) => one.rate));
  const told = `${short(rates.at(-1)?.rate ?? 0)} now, ${short(peak)} at most`;
  $("chart").setAttribute("aria-label", `Tokens per second in the last three minutes: ${told}`);
}

function drawn(kind, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// --------------------------------------------------------------------------------------- in words

const whole = (value) => Number(value).toLocaleString("en");

function short(value) {
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

/** The next of 1, 2, 5, 10, 20, ... */
function rounded(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 5, 10].find((step) => step * unit >= value);
}

/** As a person writes one: the server's are made to stand behind a name. */
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;

// ------------------------------------------------------------------------------------- the adapter

let adapter = null; // The chosen one's record; null: none.
let choices = []; // What is listed: {name, about, choose}.
let active = -1;
let searching = null; // Ends the search that runs.
let typing = 0;

const nameOf = (one) => (one.current ? one.name : `${one.name}@${one.version}`);

function about(one) {
  const rows = `${one.virtual_tokens} virtual tokens`;
  return [one.task, one.method, rows, `version ${one.version}`].filter(Boolean).join(" · ");
}

async function search(contains, page = "", found = []) {
  searching?.abort();
  const mine = (searching = new AbortController());
  const query = new URLSearchParams({ page_size: PAGE, contains, page_token: page });
  try {
    const told = await got(`v1/adapters?${query}`, mine.signal);
    found = [...found, ...told.adapters];
    offerFound(contains, found, told.next_page_token);
  } catch (error) {
    if (mine.signal.aborted) return;
    offer([{ name: error.status ? sentence(error.message) : "No answer from this server." }]);
  }
}

function offerFound(contains, found, next) {
  const option = (name, about, one) => ({ name, about, choose: () => choose(one) });
  const offered = found.map((one) => option(nameOf(one), one.task || about(one), one));
  if (!contains) offered.unshift(option("None", "the model itself", null));
  const nothing = contains ? "No adapter has that in its name." : "There are no adapters.";
  if (!found.length) offered.push({ name: nothing });
  const more = async () => {
    await search(contains, next, found);
    activate(offered.length - 1); // The first of those that came, where this stood.
  };
  const listed = `${whole(found.length)} are listed; type to find one`;
  if (next) offered.push({ name: "More …", about: listed, choose: more });
  offer(offered);
}

function offer(offered) {
  choices = offered;
  $("choices").replaceChildren(...choices.map(({ name, about, choose }, place) => {
    const item = made("li", "", { role: "option", id: `choice-${place}` });
    item.setAttribute("aria-selected", "false");
    item.append(made("span", name));
    if (about) item.append(made("span", about, { class: "hint" }));
    if (!choose) item.setAttribute("aria-disabled", "true");
    return item;
  }));
  $("choices").hidden = false;
  $("adapter").setAttribute("aria-expanded", "true");
  activate(choices.findIndex((one) => one.choose));
}

function activate(place) {
  $("choices").children[active]?.setAttribute("aria-selected", "false");
  active = place;
  const item = $("choices").children[place];
  item?.setAttribute("aria-selected", "true");
  item?.scrollIntoView({ block: "nearest" });
  if (item) $("adapter").setAttribute("aria-activedescendant", item.id);
  else $("adapter").removeAttribute("aria-activedescendant");
}

function close() {
  searching?.abort();
  clearTimeout(typing);
  $("choices").hidden = true;
  $("adapter").setAttribute("aria-expanded", "false");
  $("adapter").removeAttribute("aria-activedescendant");
  $("adapter").value = adapter ? nameOf(adapter) : "";
}

function choose(one) {
  adapter = one;
  $("adapter-about").textContent = one ? about(one) : "";
  bound();
  close();
  ask(one?.input_fields ?? []);
  command();
}

/** How long an answer may be if nobody says. */
function bound() {
  const most = adapter?.max_new_tokens || server?.limits.new_tokens_default;
  $("max-tokens").placeholder = most ? whole(most) : "";
}

const opened = () => !$("choices").hidden;

$("adapter").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => search($("adapter").value.trim()), TYPING_MS);
});
$("adapter").addEventListener("click", () => opened() || ($("adapter").select(), search("")));
$("adapter").addEventListener("blur", close);
$("adapter").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const chosen = event.key === "Enter" && opened() && !event.ctrlKey && !event.metaKey;
  if (step && opened()) activate((active + step + choices.length) % choices.length);
  else if (step) search("");
  else if (chosen) choices[active]?.choose?.();
  else if (event.key === "Escape" && opened()) close();
  else return;
  event.preventDefault();
  event.stopPropagation();
});
$("choices").addEventListener("mousedown", (event) => {
  event.preventDefault(); // The input keeps the focus.
  const item = event.target.closest("li");
  if (item) choices[[...$("choices").children].indexOf(item)].choose?.();
});

// -------------------------------------------------------------------------------------- the prompt

const areas = () => [...$("fields").querySelectorAll("textarea")];

/** The places to write in: one for the prompt, or one for each field of an adapter's template. */
function ask(names) {
  const written = new Map(areas().map((one) => [one.name, one.value]));
  const places = names.length ? names : [""];
  $("fields").replaceChildren(...places.map((name, place) => {
    const field = made("div", "", { class: "field" });
    const rows = names.length > 1 ? 3 : 5;
    const area = made("textarea", "", { id: `field-${place}`, name, rows });
    area.value = written.get(name) ?? (place === 0 ? [...written.values()][0] ?? "" : "");
    field.append(made("label", name || "Prompt", { for: area.id }), area);
    return field;
  }));
}

let running = null; // Ends the answer that comes.

async function run() {
  if (running || !$("ask").reportValidity()) return;
  running = new AbortController();
  const told = new Answer();
  try {
    const response = await asked("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
      signal: running.signal,
    });
    for await (const event of events(response.body)) told.take(event);
    told.end();
  } catch (error) {
    if (running.signal.aborted) told.end("stopped");
    else if (error instanceof Refused) told.end("refused", sentence(error.message));
    else told.end("broken off", "The connection to this server broke off.");
  } finally {
    running = null;
    $("stop").hidden = true;
    $("run").disabled = false;
  }
}

function body() {
  const record = adapter?.input_fields.length
    ? { inputs: Object.fromEntries(areas().map((one) => [one.name, one.value])) }
    : { prompt: areas()[0].value };
  if (adapter) record.model = nameOf(adapter);
  const most = $("max-tokens").value || (adapter ? "" : server?.limits.new_tokens_default);
  if (most) record.max_tokens = Number(most);
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  return { ...record, temperature: Number($("temperature").value), stream: true, stream_options };
}

/** The same for a terminal. */
function command() {
  const { stream, stream_options, ...record } = body();
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const token = sessionStorage.getItem(TOKEN) ? [`-H "authorization: Bearer $TOKEN"`] : [];
  const words = [
    `curl ${quoted(new URL("v1/completions", document.baseURI).href)}`,
    ...token,
    "-H 'content-type: application/json'",
    `-d ${quoted(JSON.stringify(record))}`,
  ];
  $("command").textContent = words.join(" \\\n  ");
}

/** The records of a stream of events, as they come. */
async function* events(stream) {
  let text = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("the answer ended before it was whole");
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
}

/** One answer, as it is shown. */
class Answer {
  constructor() {
    this.began = performance.now();
    this.first = this.last = this.count = this.firstCount = 0;
    this.finish = "";
    for (const id of ["answer", "end"]) $(id).textContent = "";
    for (const id of ["first-token", "made", "speed"]) $(id).textContent = "–";
    say($("failure"), "");
    $("answering").hidden = $("stop").hidden = false;
    $("run").disabled = true;
    $("answer").classList.add("running");
  }

  take({ choices: [choice], usage }) {
    const box = $("answer");
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    if (choice) box.append(choice.text);
    if (atEnd) box.scrollTop = box.scrollHeight;
    this.finish = choice?.finish_reason ?? this.finish;
    const count = usage?.completion_tokens ?? this.count;
    if (count === this.count) return;
    this.last = performance.now();
    if (!this.first) [this.first, this.firstCount] = [this.last, count];
    this.count = count;
    const ms = this.last - this.first;
    $("first-token").textContent = seconds(this.first - this.began);
    $("made").textContent = whole(count);
    const rate = (1000 * (count - this.firstCount)) / ms;
    $("speed").textContent = ms >= FEW_MS ? short(rate) : "–";
  }

  end(how = "", sentence = "") {
    const ends = { stop: "complete", length: "at max tokens" };
    $("answer").classList.remove("running");
    $("end").textContent = how || (ends[this.finish] ?? this.finish);
    say($("failure"), sentence);
  }
}

$("ask").addEventListener("input", command);
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

// --------------------------------------------------------------------------------------- the token

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(token)) {
    state("warn", "Token needed", "That is no token: it has other characters than tokens have.");
    return;
  }
  sessionStorage.setItem(TOKEN, token);
  $("token").value = "";
  look();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload(); // Nothing stays of what that token could see.
});
document.addEventListener("visibilitychange", () => document.hidden || look());

if (navigator.platform.startsWith("Mac")) document.querySelector("kbd").textContent = "⌘ Enter";
ask([]);
look();
