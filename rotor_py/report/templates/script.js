for (const readout of document.querySelectorAll(".readout")) {
  const picture = document.getElementById(readout.dataset.for).closest(".box");
  for (const kind of ["pointerover", "click"]) {
    picture.addEventListener(kind, (event) => {
      const title = event.target.querySelector("title");
      if (title && event.target.closest("svg")) readout.textContent = title.textContent;
    });
  }
}
const heads = [...document.querySelectorAll("th")];
const body = document.querySelector("tbody");
const value = (row, index) => {
  const cell = row.cells[index];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
};
heads.forEach((head, index) => head.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a, index), value(b, index)];
    return (typeof x === "number" ? x - y : x.localeCompare(y, undefined, {numeric: true})) * (up ? 1 : -1);
  });
  body.append(...rows);
}));
