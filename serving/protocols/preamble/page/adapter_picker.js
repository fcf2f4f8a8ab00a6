// The adapter picker: an input with a list of the adapters whose names contain its text. A name that
// no adapter has is an error and stays in the input, so that a misspelled name does not select the
// base model.

import { $, bytes, integer, newElement, sentence, setText } from "./elements.js";
import { getJson } from "./requests.js";

const PAGE_SIZE = 50; // Adapters listed at a time.
const LOOKUP_PAGE_SIZE = 1000; // The server's maximum.
const DEBOUNCE_MS = 150; // From the last keystroke to the search for adapters.

const input = $("adapter");
const list = $("choices");

let adapter = null; // The selected adapter's record; null: the base model.
let choices = []; // The listed choices: {name, about, choose}.
let active = -1; // Index of the highlighted choice.
let isStale = false; // Whether the text was changed after the list was made.
let searching = null; // AbortController of the running search.
let searchTimer = 0;
let onChange = () => {};

/** Calls a function after each selection. */
export const onAdapterChange = (callback) => (onChange = callback);
export const selectedAdapter = () => adapter;
/** Returns the name in the input; empty: the base model. */
export const typedName = () => input.value.trim();

const fullName = (record) => `${record.name}@${record.version}`;
const shortName = (record) => (record.current ? record.name : fullName(record));
const selectedName = () => (adapter ? shortName(adapter) : "");

function describe(record) {
  const size = record.virtual_tokens ? `${record.virtual_tokens} virtual tokens` : "";
  const rank = record.rank ? `rank ${record.rank}` : "";
  const parts = [record.task, record.method, size, rank, bytes(record.bytes), `version ${record.version}`];
  return parts.filter(Boolean).join(" · ");
}

/** Selects the adapter that the input names. Shows an error and returns false if there is none. */
export async function resolveAdapter() {
  closeList();
  const name = typedName();
  if (name === selectedName()) {
    showError("");
    return true;
  }
  try {
    const record = name ? await findAdapter(name) : null;
    if (name !== typedName()) return false; // The text was changed meanwhile.
    if (record === undefined) {
      showError(`This server has no adapter “${name}”. Choose one from the list, or none.`);
      return false;
    }
    select(record);
    return true;
  } catch (error) {
    showError(sentence(error.message));
    return false;
  }
}

async function findAdapter(name) {
  const contains = name.split("@")[0];
  let pageToken = "";
  do {
    const fields = { page_size: LOOKUP_PAGE_SIZE, contains, page_token: pageToken };
    const page = await getJson(`v1/adapters?${new URLSearchParams(fields)}`);
    const isNamed = (record) => [shortName(record), fullName(record)].includes(name);
    const record = page.adapters.find(isNamed);
    if (record) return record;
    pageToken = page.next_page_token;
  } while (pageToken);
  return undefined;
}

function showError(message) {
  setText($("adapter-error"), message);
  if (message) input.setAttribute("aria-invalid", "true");
  else input.removeAttribute("aria-invalid");
}

function select(record) {
  adapter = record;
  input.value = selectedName();
  $("adapter-about").textContent = record ? describe(record) : "";
  showError("");
  closeList();
  onChange();
}

async function search(contains, pageToken = "", previous = []) {
  searching?.abort();
  const controller = (searching = new AbortController());
  const query = new URLSearchParams({ page_size: PAGE_SIZE, contains, page_token: pageToken });
  try {
    const page = await getJson(`v1/adapters?${query}`, controller.signal);
    if (controller.signal.aborted) return;
    showAdapters(contains, [...previous, ...page.adapters], page.next_page_token);
  } catch (error) {
    if (!controller.signal.aborted) showChoices([{ name: sentence(error.message) }]);
  }
}

function showAdapters(contains, records, nextPageToken) {
  const choice = (name, about, record) => ({ name, about, choose: () => select(record) });
  const listed = records.map((record) =>
    choice(shortName(record), record.task || describe(record), record));
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
  list.replaceChildren(...choices.map(({ name, about, choose }, index) => {
    const item = newElement("li", "", { role: "option", id: `choice-${index}` });
    item.setAttribute("aria-selected", "false");
    item.append(newElement("span", name));
    if (about) item.append(newElement("span", about, { class: "hint" }));
    if (!choose) item.setAttribute("aria-disabled", "true");
    return item;
  }));
  isStale = false;
  list.hidden = false;
  input.setAttribute("aria-expanded", "true");
  const exact = choices.findIndex((choice) => choice.choose && choice.name === typedName());
  activate(exact >= 0 ? exact : choices.findIndex((choice) => choice.choose));
}

function activate(index) {
  list.children[active]?.setAttribute("aria-selected", "false");
  active = index;
  const item = list.children[index];
  item?.setAttribute("aria-selected", "true");
  item?.scrollIntoView({ block: "nearest" });
  if (item) input.setAttribute("aria-activedescendant", item.id);
  else input.removeAttribute("aria-activedescendant");
}

function closeList() {
  searching?.abort();
  clearTimeout(searchTimer);
  list.hidden = true;
  input.setAttribute("aria-expanded", "false");
  input.removeAttribute("aria-activedescendant");
}

/** Restores the name of the selected adapter. */
function cancel() {
  closeList();
  input.value = selectedName();
  showError("");
}

const isOpen = () => !list.hidden;

input.addEventListener("input", () => {
  searching?.abort(); // showChoices would reset isStale with the results of the previous text.
  isStale = true;
  showError("");
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => search(typedName()), DEBOUNCE_MS);
});
input.addEventListener("click", () => isOpen() || (input.select(), search("")));
input.addEventListener("blur", resolveAdapter);
input.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const enter = event.key === "Enter" && isOpen() && !event.ctrlKey && !event.metaKey;
  const isEdited = isOpen() || typedName() !== selectedName();
  if (step && isOpen()) activate((active + step + choices.length) % choices.length);
  else if (step) search("");
  else if (enter) ((!isStale && choices[active]?.choose) || resolveAdapter)();
  else if (event.key === "Escape" && isEdited) cancel();
  else return;
  event.preventDefault();
  event.stopPropagation();
});
list.addEventListener("mousedown", (event) => {
  event.preventDefault(); // Keeps the focus in the input.
  const item = event.target.closest("li");
  if (item) choices[[...list.children].indexOf(item)].choose?.();
});
