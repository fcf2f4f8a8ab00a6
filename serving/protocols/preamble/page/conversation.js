// The conversation: the prompt form, the requests that it sends, and the log of the answers. A
// model with a chat template chats, and each request contains the earlier messages. An adapter with
// a prompt template and a model without a chat template complete one prompt at a time. Texts of the
// model are inserted as text, never as HTML.

import { onAdapterChange, resolveAdapter, selectedAdapter, typedName } from "./adapter_picker.js";
import {
  $, compact, integer, newCopyButton, newElement, seconds, sentence, setText,
} from "./elements.js";
import { readEvents, readToken, request, ResponseError } from "./requests.js";

// Interval at which new text is inserted. Each insertion lays out the whole answer again, so an
// insertion per token would block the page during a long and fast answer.
const REFRESH_MS = 50;
const RATE_MIN_MS = 20; // Shorter spans give no meaningful token rate.
const NEAR_END_PX = 40; // A log that is scrolled this close to its end follows the new text.
const FINISH_REASONS = { stop: "complete", length: "at the length limit" };

let server = null; // The last /v1/server response; null: unknown.
let exchanges = []; // The prompts and answers in the log.
let running = null; // AbortController of the running request.

/** Adapts the form to the model. */
export function showModel(info) {
  server = info;
  adaptForm();
  $("prompting").hidden = false;
}

// ------------------------------------------------------------------------------------------- form

const fieldNames = () => selectedAdapter()?.input_fields ?? [];
const isChat = () => Boolean(server?.model.accepts_chats) && !fieldNames().length;
const textareas = () => [...$("fields").querySelectorAll("textarea")];

/** Shows the inputs that the model and the adapter need. */
function adaptForm() {
  const label = isChat() ? "Message" : "Prompt";
  showFields(fieldNames().length ? fieldNames().map((name) => [name, name]) : [["", label]]);
  $("system-field").hidden = !isChat();
  $("new").textContent = isChat() ? "New chat" : "Clear";
  const adapter = selectedAdapter();
  // A chat without a limit may fill the context.
  const tokens = adapter?.max_new_tokens || (isChat() ? 0 : server?.limits.new_tokens_default);
  $("max-tokens").placeholder = tokens ? integer(tokens) : "No limit";
  updateCommand();
}

/** Shows a text area for each pair of a name and a label. Texts that were typed are kept. */
function showFields(pairs) {
  const shown = textareas().map((area) => [area.name, area.labels[0].textContent]);
  if (JSON.stringify(shown) === JSON.stringify(pairs)) return;
  const texts = new Map(textareas().map((area) => [area.name, area.value]));
  $("fields").replaceChildren(...pairs.map(([name, label], index) => {
    const field = newElement("div", "", { class: "field" });
    const area = newElement("textarea", "", { id: `field-${index}`, name, rows: 2 });
    area.setAttribute("enterkeyhint", "send");
    area.value = texts.get(name) ?? (index === 0 ? [...texts.values()][0] ?? "" : "");
    field.append(newElement("label", label, { for: area.id }), area);
    return field;
  }));
}

/** Returns the path and the body of the request that the form describes. */
function buildRequest() {
  const common = { model: typedName() || server?.model.name, ...samplingFields() };
  const [text] = textareas().map((area) => area.value);
  if (isChat()) {
    const messages = [...history(), { role: "user", content: text }];
    return { path: "v1/chat/completions", body: { ...common, messages } };
  }
  const prompt = fieldNames().length
    ? { inputs: Object.fromEntries(textareas().map((area) => [area.name, area.value])) }
    : { prompt: text };
  return { path: "v1/completions", body: { ...common, ...prompt } };
}

/** Returns the messages before the next one. */
function history() {
  const system = $("system").value;
  const answered = exchanges.filter((exchange) => exchange.isChat && !exchange.failed);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...answered.flatMap(({ prompt, text }) => [
      { role: "user", content: prompt },
      { role: "assistant", content: text },
    ]),
  ];
}

function samplingFields() {
  const numbers = { temperature: "temperature", max_tokens: "max-tokens", top_p: "top-p" };
  const fields = {};
  for (const [name, id] of Object.entries({ ...numbers, seed: "seed" })) {
    if ($(id).value) fields[name] = Number($(id).value);
  }
  const needsLimit = !isChat() && !typedName(); // OpenAI's default of completions is 16 tokens.
  if (needsLimit) fields.max_tokens ??= server?.limits.new_tokens_default;
  const stops = $("stop-texts").value.split("\n").filter(Boolean).map(replaceEscapes);
  if (stops.length) fields.stop = stops;
  return fields;
}

/** Replaces the escapes \n, \t and \\ in a stop text. */
function replaceEscapes(text) {
  const characters = { n: "\n", t: "\t", "\\": "\\" };
  return text.replace(/\\([nt\\])/g, (match, letter) => characters[letter]);
}

/** Shows a curl command that sends the request of the form, without streaming. */
function updateCommand() {
  if (!$("equivalent").open) return;
  const { path, body } = buildRequest();
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const words = [
    `curl ${quoted(new URL(path, document.baseURI).href)}`,
    ...(readToken() ? [`-H "authorization: Bearer $TOKEN"`] : []),
    "-H 'content-type: application/json'",
    `-d ${quoted(JSON.stringify(body))}`,
  ];
  setText($("command"), words.join(" \\\n  "));
}

// ---------------------------------------------------------------------------------------- request

async function send() {
  if (running || !server || !$("ask").reportValidity()) return;
  const controller = (running = new AbortController());
  showRunning(true);
  try {
    if (!(await resolveAdapter())) return $("adapter").focus();
    const [area] = textareas();
    if (isChat() && !area.value.trim()) return area.focus();
    await run(controller.signal);
  } finally {
    if (running === controller) {
      running = null;
      showRunning(false);
    }
  }
}

function showRunning(isRunning) {
  const hadFocus = [$("run"), $("stop")].includes(document.activeElement);
  $("run").hidden = isRunning;
  $("stop").hidden = !isRunning;
  if (hadFocus) textareas()[0].focus(); // The focused button is hidden now.
}

/** Sends the request of the form, and shows its answer. */
async function run(signal) {
  const { path, body } = buildRequest();
  const values = textareas().map((area) => area.value);
  const lines = textareas().map((area) => `${area.name}: ${area.value}`);
  dropFailed();
  const exchange = new Exchange(values.length > 1 ? lines.join("\n") : values[0], isChat());
  exchanges.push(exchange);
  if (isChat()) textareas()[0].value = "";
  updateCommand();
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  try {
    const response = await request(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options }),
      signal,
    });
    for await (const event of readEvents(response, signal)) exchange.append(event);
    exchange.finish();
  } catch (error) {
    if (signal.aborted) exchange.finish("stopped");
    else exchange.fail(error);
    if (!signal.aborted && !(error instanceof ResponseError)) throw error;
  } finally {
    if (exchange.failed) restorePrompt(exchange);
    updateCommand();
  }
}

/** Puts the message of a failed exchange back into the form, to be sent again. */
function restorePrompt(exchange) {
  const [area] = textareas();
  if (exchange.isChat && isChat() && exchanges.includes(exchange) && !area.value) {
    area.value = exchange.prompt;
  }
}

function dropFailed() {
  for (const exchange of exchanges) if (exchange.failed) exchange.element.remove();
  exchanges = exchanges.filter((exchange) => !exchange.failed);
}

function clear() {
  running?.abort();
  exchanges = [];
  $("log").replaceChildren();
  $("log").hidden = $("new").hidden = true;
  updateCommand();
  textareas()[0].focus();
}

/** One prompt with its answer and the timings, in the log. */
class Exchange {
  constructor(prompt, isChat) {
    Object.assign(this, { prompt, isChat, text: "", failed: false });
    this.began = performance.now();
    this.first = this.last = this.count = this.firstCount = 0;
    this.reason = "";
    this.newText = ""; // Received, but not yet inserted.
    this.refreshTimer = 0;
    this.answer = newElement("div", "", { class: "answer" });
    this.failure = newElement("p", "", { class: "failure", role: "alert" });
    this.failure.hidden = true;
    this.outcome = newElement("p", "", { class: "outcome" });
    this.copyButton = newCopyButton(this.answer, "the answer");
    this.copyButton.hidden = true;
    const foot = newElement("div", "", { class: "foot" });
    foot.append(this.outcome, this.copyButton);
    const kind = isChat ? "exchange chat" : "exchange";
    this.element = newElement("article", "", { class: kind, "aria-busy": "true" });
    this.element.append(
      newElement("h3", isChat ? "You" : "Prompt", { class: "visually-hidden" }),
      newElement("div", prompt, { class: "question" }),
      newElement("h3", typedName() || server.model.name, { class: "who" }),
      this.answer,
      this.failure,
      foot,
    );
    $("log").hidden = $("new").hidden = false;
    $("log").append(this.element);
    $("log").scrollTop = $("log").scrollHeight;
  }

  append({ choices: [choice], usage }) {
    this.newText += choice?.text ?? choice?.delta?.content ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    const count = usage?.completion_tokens ?? this.count;
    if (count !== this.count) {
      this.last = performance.now();
      if (!this.first) [this.first, this.firstCount] = [this.last, count];
      this.count = count;
    }
    this.refreshTimer ||= setTimeout(() => this.refresh(), REFRESH_MS);
  }

  /** Inserts the new text and shows the figures so far. */
  refresh(outcome = "") {
    clearTimeout(this.refreshTimer);
    this.refreshTimer = 0;
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    if (this.newText) this.answer.append(this.newText);
    this.text += this.newText;
    this.newText = "";
    this.answer.classList.toggle("leading-space", this.text.startsWith(" "));
    const figures = { end: outcome, ...this.figures() };
    const shown = Object.entries(figures).filter(([, text]) => text);
    this.outcome.replaceChildren(
      ...shown.map(([name, text]) => newElement("span", text, { class: name })),
    );
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  figures() {
    if (!this.first) return {};
    const ms = this.last - this.first;
    const rate = (1000 * (this.count - this.firstCount)) / ms;
    return {
      count: this.count === 1 ? "1 token" : `${integer(this.count)} tokens`,
      speed: ms >= RATE_MIN_MS ? `${compact(rate)} tokens/s` : "",
      first: `first after ${seconds(this.first - this.began)}`,
    };
  }

  finish(outcome = FINISH_REASONS[this.reason] ?? this.reason) {
    this.refresh(outcome);
    this.element.setAttribute("aria-busy", "false");
    this.copyButton.hidden = !this.text;
    // A message without an answer is not part of the conversation.
    this.failed = !this.text && outcome === "stopped";
  }

  /** Shows an error. The part of the answer that has arrived is kept. */
  fail(error) {
    const wasRefused = error.status && !this.first;
    this.finish(wasRefused ? "refused" : "interrupted");
    this.failed = !this.text;
    setText(this.failure, sentence(error.message));
    $("log").scrollTop = $("log").scrollHeight;
  }
}

// ----------------------------------------------------------------------------------------- events

onAdapterChange(adaptForm);
$("equivalent").append(newCopyButton($("command"), "the command"));
$("equivalent").addEventListener("toggle", updateCommand);
$("adapter").addEventListener("input", updateCommand);
$("ask").addEventListener("input", updateCommand);
// An invalid input must be visible, so that the browser can show its message beside it.
$("more").addEventListener("invalid", () => ($("more").open = true), true);
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", clear);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "Enter" || event.isComposing) return;
  const isForced = event.ctrlKey || event.metaKey;
  const isPrompt = $("fields").contains(event.target) && !event.shiftKey && !event.altKey;
  if (isPrompt || (isForced && $("ask").contains(event.target))) {
    event.preventDefault();
    send();
  }
});
