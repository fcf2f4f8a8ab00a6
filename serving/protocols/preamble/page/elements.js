// Elements and texts of the page: short forms of DOM calls, formats of numbers, and copying.

const COPIED_MS = 1500; // Time for which a copy button reports the result.

export const $ = (id) => document.getElementById(id);

export function newElement(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Shows a text, or hides the element if the text is empty. */
export function setText(element, text) {
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

export const integer = (value) => Number(value).toLocaleString("en");

export function compact(value) {
  const number = Number(value);
  const notation = number < 10_000 ? "standard" : "compact";
  const digits = { maximumSignificantDigits: number < 100 ? 2 : 3 };
  return number.toLocaleString("en", { notation, ...digits });
}

export function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, Number(value))) / 10));
  return `${(Number(value) / 1024 ** power).toFixed(power > 1 ? 1 : 0)} ${units[power]}`;
}

export const seconds = (ms) =>
  ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;

/** Adds the capital and the full stop that the server's error messages lack. */
export const sentence = (text) =>
  `${text.charAt(0).toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;

/** Returns a button that copies the text of an element. `name`: what it copies. */
export function newCopyButton(element, name) {
  const button = newElement("button", "Copy", { type: "button", class: "text copy" });
  button.setAttribute("aria-label", `Copy ${name}`);
  button.addEventListener("click", async () => {
    const report = (await copy(element)) ? "Copied" : "Not copied";
    button.textContent = report;
    $("announcement").textContent = report;
    setTimeout(() => {
      button.textContent = "Copy";
      $("announcement").textContent = "";
    }, COPIED_MS);
  });
  return button;
}

/** Copies an element's text; returns whether the browser allowed it. */
async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    // Browsers have no clipboard object in pages of other hosts without TLS.
    return copySelection(element);
  }
}

function copySelection(element) {
  const selection = getSelection();
  const range = document.createRange();
  range.selectNodeContents(element);
  selection.removeAllRanges();
  selection.addRange(range);
  const copied = document.execCommand("copy");
  selection.removeAllRanges();
  return copied;
}
