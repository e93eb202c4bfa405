// Elements and formats. Text enters the page only as text nodes, so nothing that a model wrote is parsed as HTML.

// An element with children, and class names after its tag: el("p.faint.small", "text").
export function el(tag, ...children) {
  return elWith(tag, {}, children);
}

// The same with properties. They are an argument of their own, so that data of a chain is never taken for properties.
export function elWith(tag, properties, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "href") node[name] = value;
    else node.setAttribute(name, value);
  }
  return append(node, children);
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return node;
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const DIRECTION = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

// Control and direction characters as visible signs: they must not hide or reorder the text around them.
export function visible(text) {
  return text
    .replace(CONTROL, (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : "\ufffd"))
    .replace(DIRECTION, (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase()}⟩`);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return size !== 0 && size < 0.001 ? value.toExponential(1) : value.toFixed(digits);
}

export function seconds(value) {
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return value >= 1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(value < 0.01 ? 2 : 0)} ms`;
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

export function listed(names) {
  return (names ?? "").split("\n").filter(Boolean);
}

export function link(address, ...children) {
  return elWith("a", { href: address }, children);
}

export function options(pairs) {
  return pairs.map(([value, text]) => elWith("option", { value }, text));
}
