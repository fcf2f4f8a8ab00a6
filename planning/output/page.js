// Reads candidates off the picture, by a pointer, by arrow keys or from the table's rows; sorts and
// filters the table. Without it all else is there.
for (const one of document.querySelectorAll(".scripted")) one.hidden = false;

const element = (name, text, kind) => {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};

const svg = document.querySelector("svg.scatter");
const lines = [...document.querySelectorAll(".candidates tbody tr")];
if (svg) {
  const { columns, settings, rows } = JSON.parse(svg.dataset.candidates);
  const ring = svg.querySelector(".at");
  const panel = document.querySelector(".panel");
  const first = [...panel.childNodes];
  const byPlace = new Map(lines.map((line) => [Number(line.dataset.place ?? -1), line]));
  // From left to right, for the arrow keys.
  const across = rows.map((_, place) => place).sort((a, b) => rows[a][0] - rows[b][0]);
  let kept = -1;
  let at = -1;

  const list = (values, start) => {
    const made = document.createElement("dl");
    values.forEach((value, place) => {
      if (value) made.append(element("dt", columns[start + place]), element("dd", value));
    });
    return made;
  };
  const show = (place) => {
    byPlace.get(at)?.classList.remove("pointed");
    at = place;
    if (place < 0) {
      ring.setAttribute("visibility", "hidden");
      panel.replaceChildren(...first);
      return;
    }
    const [x, y, name, about, reason, values] = rows[place];
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
    ring.setAttribute("visibility", "visible");
    byPlace.get(place)?.classList.add("pointed");
    panel.replaceChildren(
      element("h3", name),
      element("p", about, "hint"),
      ...(reason ? [element("p", reason, "reason")] : []),
      list(values.slice(0, settings), 0),
      list(values.slice(settings), settings),
    );
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let best = -1;
    let least = 40 ** 2;
    rows.forEach(([left, top], place) => {
      const far = (left - x) ** 2 + (top - y) ** 2;
      // Of equal ones the last, which is drawn over the others.
      if (far <= least) [best, least] = [place, far];
    });
    return best;
  };
  svg.addEventListener("pointermove", (event) => kept < 0 && show(nearest(event)));
  svg.addEventListener("pointerleave", () => kept < 0 && show(-1));
  svg.addEventListener("click", (event) => {
    const place = nearest(event);
    kept = place === kept ? -1 : place;
    show(place);
  });
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") show((kept = -1));
    if (way === undefined) return;
    event.preventDefault();
    const now = at < 0 ? (way > 0 ? -1 : across.length) : across.indexOf(at);
    kept = across[Math.max(0, Math.min(across.length - 1, now + way))];
    show(kept);
  });
  for (const [place, line] of byPlace) {
    if (place < 0) continue;
    line.addEventListener("pointerenter", () => kept < 0 && show(place));
    line.addEventListener("pointerleave", () => kept < 0 && show(-1));
  }
}

document.querySelectorAll(".candidates thead th").forEach((head, place, heads) => {
  const button = element("button", head.textContent);
  button.type = "button";
  head.replaceChildren(button);
  const worth = (line) => {
    const { value } = line.cells[place].dataset;
    return value === undefined ? line.cells[place].textContent : Number(value);
  };
  button.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const one of heads) one.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down > 0 ? "ascending" : "descending");
    const compare = new Intl.Collator(undefined, { numeric: true }).compare;
    const sorted = [...lines].sort((one, two) => {
      const [a, b] = [worth(one), worth(two)];
      const both = typeof a === "number" && typeof b === "number";
      return down * (both ? a - b : compare(String(a), String(b)));
    });
    document.querySelector(".candidates tbody").append(...sorted);
  });
});

document.querySelector("input[type=search]")?.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  for (const line of lines) {
    const text = line.textContent.toLowerCase();
    line.hidden = !words.every((word) => text.includes(word));
  }
});
