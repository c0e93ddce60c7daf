answering.then(() => {
const text = (id) => document.getElementById(id).textContent;
const all_of = (selector) => [...document.querySelectorAll(selector)];
const texts = (selector) => all_of(selector).map((each) => each.textContent);
const told = {
  title: text("serve-title"),
  rows: all_of("#serve-answer tbody tr").map((row) => [...row.children].map((cell) => cell.textContent)),
  says: texts("#serve-answer [data-role]"),
  missing: text("serve-answer").match(/mla-conformance certify .*/)[0],
  changes: text("serve-changes"),
  link: document.getElementById("serve-link").getAttribute("href"),
  severities: texts(".severity"),
  width: [document.documentElement.scrollWidth, innerWidth],
};
const choose = (name, value) => {
  const chosen = document.getElementById(`serve-${name}`);
  chosen.value = value;
  chosen.dispatchEvent(new Event("input"));
};
choose("to", "0.8");
told.unknown = text("serve-changes");
choose("engine", "");
told.chosen_first = document.getElementById("serve-gpu").options[0].value;
choose("gpu", "NVIDIA H100 80GB HBM3");
told.elsewhere = { says: texts("#serve-answer [data-role=decode]"), note: texts("#serve-answer .words") };
choose("gpu", "NVIDIA H200");
told.sorted = texts("#serve-answer table:last-of-type tbody th");
choose("model", "deepseek-v3.2");
told.roles = all_of("#serve-answer [data-role]").map((part) => part.dataset.role);
parent.postMessage({ frame: window.name, ...told }, "*");
});
