const whole = typeof answering === "undefined" ? Promise.resolve() : answering;
whole.catch((error) => complaints.push(String(error))).then(() => {
const told = {};
const press = (key, target) => (target ?? document.activeElement).dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const shown = () => entries.filter((entry) => entry.checkVisibility()).length;
const name = (each) => (each.getAttribute("aria-label") ?? each.labels?.[0]?.textContent ?? each.textContent).trim();
const type = (text) => { filter.value = text; filter.dispatchEvent(new Event("input")); };

told.maps = all("figure svg[role=img]").map((each) => {
  const { width, height } = each.getBoundingClientRect(), cells = each.viewBox.baseVal;
  return [each.querySelector("title").textContent, width / cells.width === height / cells.height, width > 100];
});
told.width = [document.documentElement.scrollWidth, innerWidth];
told.all = shown();
press("/"); told.filterHasFocus = document.activeElement === filter;
press("n"); told.keysAreTextInTheFilter = document.activeElement === filter;
type("wanted"); told.filtered = shown();
told.says = document.getElementById("shown").textContent;
told.strangers = entries.filter((entry) => entry.checkVisibility() && !entry.textContent.includes("wanted")).length;
type("nothing is called this"); told.none = [shown(), all("section[data-part]:not([hidden])").length];
press("Escape"); told.escaped = [shown(), filter.value];
press("f"); told.failing = shown();
told.innocent = entries.filter((entry) => entry.checkVisibility() && !("failing" in entry.dataset)).length;
press("f");
const places = [];
for (const key of ["n", "n", "p", "p"]) {
  press(key); places.push(all("[data-failure]").indexOf(document.activeElement));
}
told.places = places; told.failures = all("[data-failure]").length;
press("n");
told.outline = getComputedStyle(document.activeElement).outlineStyle;
const box = document.activeElement.getBoundingClientRect();
told.inSight = box.top >= 0 && box.top < innerHeight;
document.getElementById("next").click(); told.byButton = document.activeElement.matches("[data-failure]");
const scroll = all(".scroll").find((each) => each.querySelector(".held") && each.scrollWidth > each.clientWidth);
scroll.scrollLeft = 200;
const first = scroll.querySelector("tbody th").getBoundingClientRect(), place = scroll.getBoundingClientRect();
told.held = Math.abs(first.left - place.left) < 3 && scroll.scrollLeft > 0;
all("details").forEach((each) => { each.open = true; });
told.widthWhenOpen = [document.documentElement.scrollWidth, innerWidth];
const controls = all("button, summary, input, a, [role=region]").filter((each) => each.checkVisibility());
const names = controls.map((each) => each.getAttribute("aria-labelledby")
  ? document.getElementById(each.getAttribute("aria-labelledby")).textContent : name(each));
told.nameless = names.filter((each) => !each).length;
const parts = new Set(all("nav a").map(name));  // a link has its part's name
told.twice = names.filter((each, index) => names.indexOf(each) < index && !parts.has(each));
told.unreachable = controls.filter((each) => each.tabIndex < 0).length;
told.sticksOut = all("main *").filter((each) => !each.closest(".scroll, .apart")
  && each.getBoundingClientRect().right > innerWidth + 1).slice(0, 5).map((each) => each.outerHTML.slice(0, 120));
told.dark = matchMedia("(prefers-color-scheme: dark)").matches;
const rgba = (text) => { const [r, g, b, a = 1] = text.match(/[\d.e-]+/g).map(Number); return [r, g, b, a]; };
const over = (above, below) => [0, 1, 2].map((i) => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
const behind = (each) => {
  const own = each ? rgba(getComputedStyle(each).backgroundColor) : told.dark ? [18, 18, 18, 1] : [255, 255, 255, 1];
  return own[3] === 1 ? own : over(own, behind(each.parentElement));
};
const light = (color) => color.slice(0, 3).map((part) => part / 255)
  .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (each) => {
  const below = behind(each), pair = [below, over(rgba(getComputedStyle(each).color), below)].map(light);
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), faint = new Map();
for (let node = texts.nextNode(); node; node = texts.nextNode()) {
  const each = node.parentElement;
  if (!node.data.trim() || each.closest("script, style, svg") || !each.checkVisibility()) continue;
  if (contrast(each) < 4.5) faint.set(each.outerHTML.slice(0, 100), contrast(each).toFixed(2));
}
told.faint = [...faint].slice(0, 5);
parent.postMessage({ frame: window.name, ...told, complaints }, "*");
});
