// What a person would find wrong with a page: {width, screen, texts, cut, overlapping, faint}.
const boxOf = (element) => element.closest(".box, .long");
const texts = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode, parent = node.parentElement;
  if (!node.data.trim() || parent.closest("title, script, style")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    if (rect.width && rect.height) texts.push({words: node.data.trim().slice(0, 60), range, parent, box: boxOf(parent), rect});
  }
}

// Inside the drawing, inside what can be scrolled to, inside the page.
const cut = texts.filter(({parent, box, rect}) => {
  const frame = (parent.closest("svg") || document.documentElement).getBoundingClientRect();
  const out = rect.left < frame.left - 1 || rect.right > frame.right + 1
    || rect.top < frame.top - 1 || rect.bottom > frame.bottom + 1;
  if (!box) return out;
  const edge = box.getBoundingClientRect();
  return out && Boolean(parent.closest("svg"))
    || rect.left - edge.left + box.scrollLeft < -1 || rect.right - edge.left + box.scrollLeft > box.scrollWidth + 2
    || rect.top - edge.top + box.scrollTop < -1 || rect.bottom - edge.top + box.scrollTop > box.scrollHeight + 2;
}).map((text) => text.words);

// Lines of text may touch; a third of their height is another matter.
const overlapping = [];
texts.forEach((a, at) => {
  for (const b of texts.slice(at + 1)) {
    if (a.box !== b.box || a.parent === b.parent) continue;
    const across = Math.min(a.rect.right, b.rect.right) - Math.max(a.rect.left, b.rect.left);
    const down = Math.min(a.rect.bottom, b.rect.bottom) - Math.max(a.rect.top, b.rect.top);
    if (across > 1 && down > Math.min(a.rect.height, b.rect.height) / 3) overlapping.push([a.words, b.words]);
  }
});

const parse = (colour) => {
  const [r, g, b, alpha = 1] = (colour.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  return {rgb: [r, g, b], alpha};
};
const over = (top, below) => below.map((value, at) => top.rgb[at] * top.alpha + value * (1 - top.alpha));
const brightness = (rgb) => {
  const [r, g, b] = rgb.map((value) => value / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const drawn = (element) => {
  const style = getComputedStyle(element);
  if (!(element instanceof SVGElement) || element.tagName === "svg") return parse(style.backgroundColor);
  if (["text", "line"].includes(element.tagName) || style.fill === "none") return {rgb: [0, 0, 0], alpha: 0};
  const fill = parse(style.fill);
  return {rgb: fill.rgb, alpha: fill.alpha * Number(style.fillOpacity)};
};
// From the page's ground upwards, all that is painted under the middle of a text.
const ground = (parent, rect) => {
  const middle = [(rect.left + rect.right) / 2, (rect.top + rect.bottom) / 2];
  const under = document.elementsFromPoint(...middle);
  return (under.length ? under : [parent]).reverse().map(drawn).reduce((below, top) => over(top, below), [255, 255, 255]);
};
const faint = [];
for (const text of texts) {
  text.parent.scrollIntoView({block: "center", inline: "center"});
  const back = ground(text.parent, text.range.getClientRects()[0]);
  const style = getComputedStyle(text.parent);
  const front = over(parse(text.parent.tagName === "text" ? style.fill : style.color), back);
  const [low, high] = [brightness(front), brightness(back)].sort((a, b) => a - b);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < 4.5) faint.push([text.words, contrast, front.join(), back.join()]);
}
scrollTo(0, 0);
return {
  width: document.documentElement.scrollWidth, screen: document.documentElement.clientWidth, texts: texts.length, cut, overlapping, faint,
};
