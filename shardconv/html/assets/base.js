// The document, text and numbers.
//
// Text of a checkpoint becomes text nodes and values of attributes, never markup: no script uses innerHTML, and the
// content security policy of the page refuses it.

const SVG = 'http://www.w3.org/2000/svg';

/** An element with attributes, listeners (`onclick`), custom properties (`style`) and children. */
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for an element of SVG. */
function graphic(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...shown.map((child) => (typeof child === 'string' ? visible(child) : child)));
  return node;
}

/** Text that only screen readers have. */
function hidden(text) {
  return element('span', { class: 'hidden' }, text);
}

/** A section with a heading; `id` is for links. */
function section(id, title, ...children) {
  const heading = element('h2', { id: `${id}-title` }, title);
  return element('section', { id, 'aria-labelledby': `${id}-title` }, heading, ...children);
}

/** A name or path that may break after its dots and slashes. */
function breakable(text) {
  const parts = text.split(/(?<=[./_])/).flatMap((part) => [part, element('wbr')]);
  return parts.slice(0, -1);
}

// Characters without a shape. Some change the direction of text, so that one name could look like another.
const SHAPELESS = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu;

/** Text with escapes in place of control characters and the like. */
function visible(text) {
  return text.replace(SHAPELESS, (found) => `\\u{${found.codePointAt(0).toString(16)}}`);
}

/** Bytes for people, in powers of ten. */
function size(bytes) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let unit = 0;
  let number = bytes;
  while (number >= 999.5 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return `${unit ? Number(number.toPrecision(3)) : Math.round(number)}\u00a0${units[unit]}`;
}

/** Seconds, in the unit that fits. */
function duration(seconds) {
  const units = [[1e6, 'µs'], [1e3, 'ms']];
  const [factor, unit] = units.find(([each]) => seconds * each < 999.5) ?? [1, 's'];
  return `${Number((seconds * factor).toPrecision(3))}\u00a0${unit}`;
}

function percent(fraction) {
  return `${(100 * fraction).toFixed(1)}\u00a0%`;
}

function grouped(number) {
  return number.toLocaleString('en-US');
}

function counted(number, noun) {
  return `${grouped(number)} ${noun}${number === 1 ? '' : 's'}`;
}

function shapeText(shape) {
  return shape.length ? shape.join(' × ') : 'scalar';
}

/** Ascending numbers with runs as `first–last`. */
function rangesText(numbers) {
  const found = [];
  for (const number of numbers) {
    const last = found[found.length - 1];
    if (last && last[1] === number - 1) last[1] = number;
    else found.push([number, number]);
  }
  return found.map(([first, last]) => rangeText(first, last)).join(', ');
}

function rangeText(first, last) {
  if (first === last) return `${first}`;
  return last - first === 1 ? `${first}, ${last}` : `${first}–${last}`;
}

/** Values of consecutive ranks: `[value, count]` to `{ value, first, last }`. */
function rankRanges(runs) {
  let first = 0;
  return runs.map(([value, count]) => {
    first += count;
    return { value, first: first - count, last: first - 1 };
  });
}

function ranksText({ first, last }) {
  return first === last ? `rank ${first}` : `ranks ${rangeText(first, last)}`;
}

/** Terms and their descriptions. */
function terms(pairs, name = 'terms') {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== '');
  const groups = shown.map(([term, value]) => element('div', {}, element('dt', {}, term), element('dd', {}, value)));
  return element('dl', { class: name }, groups);
}
