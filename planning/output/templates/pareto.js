// Interaction of the plan page: shows the details of the candidate that the pointer (in the scatter
// plot or the table) or an arrow key selects; sorts and filters the table. Without JavaScript, the
// page has only the details of the recommended candidate.
for (const control of document.querySelectorAll(".scripted")) control.hidden = false;

const newElement = (tag, text, className) => {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
};

const svg = document.querySelector("svg.scatter");
const tableRows = [...document.querySelectorAll(".candidates tbody tr")];
if (svg) {
  const { columns, settings, rows: candidates } = JSON.parse(svg.dataset.candidates);
  const marker = svg.querySelector(".at");
  const panel = document.querySelector(".panel");
  const initialPanel = [...panel.childNodes];
  // Maps a candidate's index in the plot to its table row; -1 stands for rows without a point.
  const rowByIndex = new Map(tableRows.map((row) => [Number(row.dataset.point ?? -1), row]));
  // Candidate indices from left to right, for the arrow keys.
  const byX = [...candidates.keys()].sort((a, b) => candidates[a][0] - candidates[b][0]);
  let pinned = -1; // The index of the candidate that a click or a key has fixed; -1: none.
  let shown = -1; // The index of the highlighted candidate; -1: none.

  const definitionList = (values, firstColumn) => {
    const list = document.createElement("dl");
    values.forEach((value, index) => {
      if (!value) return;
      list.append(newElement("dt", columns[firstColumn + index]), newElement("dd", value));
    });
    return list;
  };
  const show = (index) => {
    rowByIndex.get(shown)?.classList.remove("highlighted");
    shown = index;
    if (index < 0) {
      marker.setAttribute("visibility", "hidden");
      panel.replaceChildren(...initialPanel);
      return;
    }
    const [x, y, name, about, reason, values] = candidates[index];
    marker.setAttribute("cx", x);
    marker.setAttribute("cy", y);
    marker.setAttribute("visibility", "visible");
    rowByIndex.get(index)?.classList.add("highlighted");
    panel.replaceChildren(
      newElement("h3", name),
      newElement("p", about, "hint"),
      ...(reason ? [newElement("p", reason, "reason")] : []),
      definitionList(values.slice(0, settings), 0),
      definitionList(values.slice(settings), settings),
    );
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let best = -1;
    let bestSquare = 40 ** 2; // A candidate at a distance of more than 40 units is not selected.
    candidates.forEach(([left, top], index) => {
      const square = (left - x) ** 2 + (top - y) ** 2;
      // At equal distances, the later candidate is selected: it is drawn over the earlier ones.
      if (square <= bestSquare) [best, bestSquare] = [index, square];
    });
    return best;
  };
  svg.addEventListener("pointermove", (event) => pinned < 0 && show(nearest(event)));
  svg.addEventListener("pointerleave", () => pinned < 0 && show(-1));
  svg.addEventListener("click", (event) => {
    const index = nearest(event);
    pinned = index === pinned ? -1 : index;
    show(index);
  });
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") show((pinned = -1));
    if (step === undefined) return;
    event.preventDefault();
    // If no candidate is shown, ArrowRight selects the leftmost and ArrowLeft the rightmost one.
    const position = shown < 0 ? (step > 0 ? -1 : byX.length) : byX.indexOf(shown);
    pinned = byX[Math.max(0, Math.min(byX.length - 1, position + step))];
    show(pinned);
  });
  for (const [index, row] of rowByIndex) {
    if (index < 0) continue;
    row.addEventListener("pointerenter", () => pinned < 0 && show(index));
    row.addEventListener("pointerleave", () => pinned < 0 && show(-1));
  }
}

document.querySelectorAll(".candidates thead th").forEach((header, column, headers) => {
  const button = newElement("button", header.textContent);
  button.type = "button";
  header.replaceChildren(button);
  const sortKey = (row) => {
    const { value } = row.cells[column].dataset;
    return value === undefined ? row.cells[column].textContent : Number(value);
  };
  button.addEventListener("click", () => {
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    const compare = new Intl.Collator(undefined, { numeric: true }).compare;
    const sorted = [...tableRows].sort((left, right) => {
      const [a, b] = [sortKey(left), sortKey(right)];
      const numeric = typeof a === "number" && typeof b === "number";
      return direction * (numeric ? a - b : compare(String(a), String(b)));
    });
    document.querySelector(".candidates tbody").append(...sorted);
  });
});

document.querySelector("input[type=search]")?.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const row of tableRows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
});
