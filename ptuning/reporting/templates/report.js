// Shows the values of the curves at a step that the pointer or the arrow keys select. The rest of the
// report needs no JavaScript.
for (const svg of document.querySelectorAll("svg.chart")) {
  const lines = JSON.parse(svg.dataset.lines);
  const cursor = svg.querySelector(".at");
  const output = svg.closest("figure").querySelector("output");
  const initialText = output.textContent;
  const pointsByStep = new Map();
  for (const [name, points] of lines)
    for (const [x, step, value] of points) {
      const values = [...(pointsByStep.get(step)?.values ?? []), [name, value]];
      pointsByStep.set(step, { x, values });
    }
  const steps = [...pointsByStep.keys()].sort((a, b) => a - b);
  let current = -1; // Index in `steps`; -1: none.

  const show = (index) => {
    current = Math.max(0, Math.min(steps.length - 1, index));
    const { x, values } = pointsByStep.get(steps[current]);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    const words = values.map(([name, value]) => (lines.length > 1 ? `${name} ${value}` : value));
    output.textContent = `step ${steps[current]}: ${words.join(", ")}`;
  };
  const hide = () => {
    current = -1;
    cursor.setAttribute("visibility", "hidden");
    output.textContent = initialText;
  };
  const showNearest = (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const distance = (index) => Math.abs(pointsByStep.get(steps[index]).x - x);
    let best = 0;
    for (let index = 1; index < steps.length; index += 1)
      if (distance(index) < distance(best)) best = index;
    show(best);
  };

  if (steps.length === 0) continue;
  svg.addEventListener("pointermove", showNearest);
  svg.addEventListener("pointerdown", showNearest);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (direction === undefined) return;
    event.preventDefault();
    show(current < 0 ? (direction > 0 ? 0 : steps.length - 1) : current + direction);
  });
}
