// Reads values off the curves: by a pointer, or by the arrow keys. Without it all else is there.
for (const svg of document.querySelectorAll("svg.chart")) {
  const lines = JSON.parse(svg.dataset.lines);
  const rule = svg.querySelector(".at");
  const said = svg.closest("figure").querySelector("output");
  const first = said.textContent;
  const steps = new Map();
  for (const [name, points] of lines)
    for (const [across, step, value] of points)
      steps.set(step, { across, values: [...(steps.get(step)?.values ?? []), [name, value]] });
  const places = [...steps.keys()].sort((one, two) => one - two);
  let at = -1;

  const show = (place) => {
    at = Math.max(0, Math.min(places.length - 1, place));
    const { across, values } = steps.get(places[at]);
    rule.setAttribute("x1", across);
    rule.setAttribute("x2", across);
    rule.setAttribute("visibility", "visible");
    const words = values.map(([name, value]) => (lines.length > 1 ? `${name} ${value}` : value));
    said.textContent = `step ${places[at]}: ${words.join(", ")}`;
  };
  const hide = () => {
    at = -1;
    rule.setAttribute("visibility", "hidden");
    said.textContent = first;
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    for (let place = 1; place < places.length; place += 1)
      if (
        Math.abs(steps.get(places[place]).across - across) <
        Math.abs(steps.get(places[best]).across - across)
      )
        best = place;
    show(best);
  };

  if (places.length === 0) continue;
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way === undefined) return;
    event.preventDefault();
    show(at < 0 ? (way > 0 ? 0 : places.length - 1) : at + way);
  });
}
