// The page can be read without this. With it: what a rectangle is, at once and in full; the rectangles of one call site,
// when its row is pointed at; a closer look at a time, by dragging over it (a double click shows all of it again).
"use strict";
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip";
tip.hidden = true;
const spotlight = document.head.appendChild(document.createElement("style"));

const show = us => us < 1e3 ? `${Math.round(us)} us` : us < 1e6 ? `${(us / 1e3).toFixed(2)} ms` : `${(us / 1e6).toFixed(3)} s`;

for (const section of document.querySelectorAll("section")) {
  for (const row of section.querySelectorAll("tr[data-site]")) {
    const only = () => { spotlight.textContent = `#${section.id} .b:not(.s${row.dataset.site}) { opacity: .12 }`; };
    const all = () => { spotlight.textContent = ""; };
    row.addEventListener("mouseenter", only);
    row.addEventListener("focus", only);
    row.addEventListener("mouseleave", all);
    row.addEventListener("blur", all);
  }
  const picture = section.querySelector("svg");
  if (!picture) continue;

  picture.addEventListener("mousemove", event => {
    const mark = event.target;
    const title = mark.querySelector(":scope > title");
    if (title) {
      // Else the browser shows it a second time.
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    tip.hidden = !mark.dataset.tip;
    if (tip.hidden) return;
    tip.textContent = mark.dataset.tip;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    const below = event.clientY + 18;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
  });
  picture.addEventListener("mouseleave", () => { tip.hidden = true; });

  const [left, width] = picture.dataset.plot.split(" ").map(Number);
  const times = picture.dataset.times.split(" ").map(Number);
  const plots = [...picture.querySelectorAll(".plot")];
  const hatch = picture.querySelector("pattern");
  let from = 0, until = 1;

  const zoom = (a, b) => {
    [from, until] = [a, b];
    for (const plot of plots) {
      plot.setAttribute("viewBox", `${a * width} 0 ${(b - a) * width} ${plot.getAttribute("height")}`);
    }
    hatch.setAttribute("patternTransform", `scale(${b - a} 1) rotate(45)`);
    const ticks = [...picture.querySelectorAll(".tick")];
    ticks.forEach((tick, i) => {
      const at = (a + (b - a) * i / (ticks.length - 1)) * (times.length - 1), low = Math.floor(at);
      const high = Math.min(low + 1, times.length - 1);
      tick.textContent = show(times[low] + (times[high] - times[low]) * (at - low));
    });
  };

  // Where the pointer is, as a share of the plots' width.
  const share = event => {
    const box = picture.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width;
    return Math.max(0, Math.min(1, (x - left) / width));
  };
  const brush = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  brush.setAttribute("class", "brush");
  brush.setAttribute("height", picture.viewBox.baseVal.height);
  let start = null;
  const draw = event => {
    const [a, b] = [start, share(event)].sort((a, b) => a - b);
    brush.setAttribute("x", left + a * width);
    brush.setAttribute("width", (b - a) * width);
    return [a, b];
  };
  picture.addEventListener("mousedown", event => {
    if (event.button !== 0) return;
    event.preventDefault();
    start = share(event);
    draw(event);
    picture.append(brush);
  });
  addEventListener("mousemove", event => { if (start !== null) draw(event); });
  addEventListener("mouseup", event => {
    if (start === null) return;
    const [a, b] = draw(event);
    start = null;
    brush.remove();
    // Less than that is a click.
    if (b - a > 0.005) zoom(from + a * (until - from), from + b * (until - from));
  });
  picture.addEventListener("dblclick", () => zoom(0, 1));
}
