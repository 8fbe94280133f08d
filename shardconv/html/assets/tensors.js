// The tensors: a table of kinds or of every tensor, with search, and which rank holds which interval.

/** Names as text that sorts by their numbers. */
function sortKey(name) {
  return name.replace(/\d+/g, (digits) => digits.padStart(6, '0'));
}

/** Every name of a pattern whose `*` stand for nested ranges of numbers. */
function namesOf(pattern, ranges) {
  if (!ranges.length) return [pattern];
  const parts = pattern.split('*');
  const names = [];
  const add = (prefix, inner, depth) => {
    for (const [first, last, rest] of inner) {
      for (let number = first; number <= last; number += 1) {
        const name = prefix + number + parts[depth + 1];
        if (rest) add(name, rest, depth + 1);
        else names.push(name);
      }
    }
  };
  add(parts[0], ranges, 0);
  return names;
}

/** Kinds with the fields that the table reads, and every tensor. */
function expanded({ kinds, names }) {
  const prepared = kinds.map(prepareKind);
  const times = new Map();
  for (const [pattern] of names) times.set(pattern, (times.get(pattern) ?? 0) + 1);
  const row = ([pattern, index, ranges]) => {
    const label = times.get(pattern) > 1 ? withRanges(pattern, ranges) : pattern;
    return { label, kind: prepared[index], names: namesOf(pattern, ranges) };
  };
  return { prepared, patterns: names.map(row) };
}

/** A pattern that several kinds have, with short ranges of numbers in place of `*`, such as the experts of a rank. */
function withRanges(pattern, ranges) {
  let level = ranges;
  return pattern.replace(/\*/g, () => {
    const text = (level ?? []).map(([first, last]) => rangeText(first, last)).join(', ');
    const isSame = new Set((level ?? []).map(([, , rest]) => JSON.stringify(rest))).size === 1;
    level = isSame ? level[0][2] : null;
    return text && text.length < 20 ? `{${text}}` : '*';
  });
}

function prepareKind(kind) {
  const ranges = rankRanges(kind.intervals);
  const largest = largestOf(kind.rank_bytes.map(([bytes]) => bytes));
  const isPadded = ranges.some(({ value }) => value.some((entry) => entry.length === 1));
  const held = sum(ranges.map(({ value, first, last }) => (last - first + 1) * sum(value.map(intervalSize))));
  const isShared = kind.dim !== null && held > kind.shape[kind.dim];
  const placement = placementText(kind, ranges);
  const text = `${kind.dtype} ${placement} ${kind.reason} ${kind.units.join(' ')}`.toLowerCase();
  return { ...kind, placement, ranges, largest, isPadded, isShared, text };
}

/** The placement; of an expert that one of several ranks has, this rank. */
function placementText({ placement, style }, ranges) {
  const held = ranges.filter(({ value }) => value.length);
  const isOnOne = style === 'expert' && ranges.length > 1 && held.length === 1 && held[0].first === held[0].last;
  return isOnOne ? `expert on ${ranksText(held[0])}` : placement;
}

/** Elements of an interval `[start, stop]`; padding is `{padding: size}`. */
function intervalSize(entry) {
  return Array.isArray(entry) ? entry[1] - entry[0] : 0;
}

function filtersOf(prepared) {
  const dims = [...new Set(prepared.map(({ dim }) => dim))].filter((dim) => dim !== null).sort((a, b) => a - b);
  const filters = [
    { label: 'All placements', accepts: () => true },
    ...dims.map((dim) => ({ label: `Sharded on dim ${dim}`, accepts: (kind) => kind.dim === dim })),
    { label: 'Partly replicated', accepts: (kind) => kind.isShared },
    { label: 'Padded', accepts: (kind) => kind.isPadded },
    { label: 'Replicated', accepts: (kind) => kind.dim === null },
  ];
  return filters.filter(({ accepts }) => prepared.some(accepts));
}

const RANGE = /\{(\d+)\.\.(\d+)\}/;

/** Whether a name or a kind has every word of a query; in a word `*` is any text, `{2..5}` the numbers from 2 to 5. */
function matcher(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean).map(wordMatcher);
  return (name, kind) => words.every((word) => word(name) || word(kind.text));
}

function wordMatcher(word) {
  const range = RANGE.exec(word);
  if (!range && !word.includes('*')) return (text) => text.includes(word);
  const escaped = (part) => part.replace(/[.+?^${}()|[\]\\]/g, '\\$&').replaceAll('*', '.*');
  if (!range) {
    const pattern = new RegExp(escaped(word));
    return (text) => pattern.test(text);
  }
  const [before, after] = [word.slice(0, range.index), word.slice(range.index + range[0].length)];
  const pattern = new RegExp(`${escaped(before)}(?<!\\d)(\\d+)(?!\\d)${escaped(after)}`, 'g');
  const isInRange = ([, number]) => Number(number) >= Number(range[1]) && Number(number) <= Number(range[2]);
  return (text) => [...text.matchAll(pattern)].some(isInRange);
}

function tensorsSection(plan, table) {
  const { prepared, patterns } = expanded(table);
  const filters = filtersOf(prepared);
  const controls = tensorControls(filters, () => update());
  const details = (row) => tensorDetails(row, plan);
  const kindTable = new DataTable('Kinds of tensors', tensorColumns(true), details);
  const nameTable = new DataTable('Tensors', tensorColumns(false), details);
  const place = element('div');

  const update = () => {
    const matches = matcher(controls.search.value);
    const { accepts } = filters[controls.filter.selectedIndex];
    const rows = patterns.filter(({ kind }) => accepts(kind)).flatMap((one) => matched(one, matches));
    const isEvery = controls.every.checked;
    const current = isEvery ? nameTable : kindTable;
    current.show(isEvery ? rows.flatMap(eachTensor) : rows);
    place.replaceChildren(current.node);
    const found = sum(rows.map(({ count }) => count));
    const kinds = isEvery ? '' : `, ${counted(rows.length, 'kind')}`;
    controls.status.textContent = `${grouped(found)} of ${counted(plan.num_tensors, 'tensor')}${kinds}`;
  };
  update();
  return section('tensors', 'Tensors', controls.node, place);
}

/** The tensors of a pattern that match a query, as a row of the table of kinds. */
function matched({ label, kind, names }, matches) {
  const found = names.filter((name) => matches(name.toLowerCase(), kind));
  const name = found.length === 1 ? found[0] : label;
  return found.length ? [{ name, kind, names: found, count: found.length }] : [];
}

function eachTensor({ kind, names }) {
  return names.map((name) => ({ name, kind, count: 1 }));
}

function tensorControls(filters, update) {
  const search = searchField('search', 'Search names, rules and dtypes; * is any text', update);
  const options = filters.map(({ label }) => element('option', {}, label));
  const filter = element('select', { id: 'filter', onchange: update }, options);
  const choice = (id, label, checked) => {
    const input = element('input', { type: 'radio', name: 'rows', id, checked, onchange: update });
    return [input, element('label', { for: id }, label)];
  };
  const choices = [choice('kinds', 'By kind', true), choice('every', 'Every tensor', false)];
  const rows = element('fieldset', { class: 'choices' }, element('legend', { class: 'hidden' }, 'Rows'), choices);
  const placement = element('div', { class: 'field' }, element('label', { for: 'filter' }, 'Placement'), filter);
  const status = element('p', { role: 'status', class: 'status' });
  const attributes = { class: 'controls', role: 'search', 'aria-label': 'Tensors' };
  const node = element('div', attributes, search.node, placement, rows, status);
  return { node, search: search.input, filter, status, every: rows.querySelector('#every') };
}

function tensorColumns(isOfKinds) {
  const bytes = ({ kind, count }) => kind.num_bytes * count;
  const perRank = ({ kind, count }) => kind.largest * count;
  const sizes = (label, key, wide) => ({ label, numeric: true, wide, key, cell: (row) => size(key(row)) });
  const ofKind = (label, key, more) => {
    const text = ({ kind }) => key(kind);
    return { label, key: text, cell: text, ...more };
  };
  const shape = { name: 'shape', wide: true, key: ({ kind }) => kind.shape.reduce((a, b) => a * b, 1) };
  const placement = { name: 'placement', cell: ({ kind }) => [glyph(kind), kind.placement] };
  const name = ({ name: text }) => element('code', {}, breakable(text));
  const count = { label: 'Count', numeric: true, cell: (row) => grouped(row.count), key: (row) => row.count };
  return [
    { label: isOfKinds ? 'Tensors' : 'Tensor', cell: name, key: (row) => sortKey(row.name) },
    ...(isOfKinds ? [count] : []),
    ofKind('dtype', (kind) => kind.dtype, { wide: true }),
    ofKind('Shape', (kind) => shapeText(kind.shape), shape),
    ofKind('Placement', (kind) => kind.placement, placement),
    ofKind('Rule', ruleText, { wide: true }),
    sizes('Full', bytes, true),
    sizes('Per rank', perRank, false),
  ];
}

function ruleText({ style, units }) {
  return units.length ? `${style} by ${unitsText({ units })}` : style;
}

function unitsText({ units }) {
  return [...new Set(units)].join(', ');
}

/** A small picture of a matrix: lines across the sharded dim, filled where every rank holds all of it. */
function glyph(kind) {
  const name = kind.dim === null ? 'replicated' : kind.isShared ? 'shared' : 'sharded';
  const frame = graphic('rect', { x: 1, y: 1, width: 16, height: 12, rx: 1.5, class: `glyph ${name}` });
  const isAcross = kind.shape.length > 1 && kind.dim === kind.shape.length - 1;
  const line = (part) => {
    const [x, y] = [1 + 16 * part, 1 + 12 * part];
    const ends = isAcross ? { x1: x, x2: x, y1: 1, y2: 13 } : { x1: 1, x2: 17, y1: y, y2: y };
    return graphic('line', { ...ends, class: `glyph ${name}` });
  };
  const lines = kind.dim === null ? [] : [0.25, 0.5, 0.75].map(line);
  return graphic('svg', { class: 'glyph', width: 18, height: 14, 'aria-hidden': 'true' }, frame, lines);
}

/** The reason of a placement; only alternatives in the pattern of its rule that the name contains. */
function reasonFor(name, reason) {
  return reason.replace(/\{([^{}]*,[^{}]*)\}/g, (all, choices) => {
    const found = choices.split(',').filter((choice) => choice && name.includes(choice));
    return found.reduce((a, b) => (b.length > a.length ? b : a), '') || all;
  });
}

function tensorDetails({ name, kind, count }, plan) {
  const facts = terms([
    ['Why', breakable(reasonFor(name, kind.reason))],
    ['Boundaries', kind.units.length ? `between units of ${unitsText(kind)}` : null],
    ['Shape', `${shapeText(kind.shape)}, ${kind.dtype}`],
    ['Full size', count > 1 ? `${size(kind.num_bytes)} each` : size(kind.num_bytes)],
  ], 'terms');
  return [facts, kind.dim === null ? everyRank(kind, plan) : holders(kind)];
}

function everyRank(kind, plan) {
  const count = plan.rank_bytes.length;
  const held = rankRanges(kind.rank_bytes).filter(({ value }) => value);
  const isOnAll = held.length === 1 && held[0].last - held[0].first === count - 1;
  if (!isOnAll && held.length) return element('p', {}, `Held in full on ${held.map(ranksText).join(' and ')}.`);
  return element('p', {}, count === 1 ? 'The only rank holds it.' : `Each of the ${count} ranks holds all of it.`);
}

/** Which rank holds which intervals of the sharded dim. */
function holders(kind) {
  const bytes = kind.rank_bytes.flatMap(([value, ranks]) => Array(ranks).fill(value));
  const text = (entry) => (entry.length === 2 ? `[${entry[0]}, ${entry[1]})` : `${entry[0]} of padding`);
  const columns = [
    { label: 'Ranks', cell: (row) => ranksText(row) },
    { label: `Dim ${kind.dim}`, name: 'bars', wide: true, cell: ({ value }) => intervalBar(value, kind) },
    { label: `Elements of dim ${kind.dim}`, cell: ({ value }) => value.map(text).join(', ') || 'none' },
    { label: 'Each holds', numeric: true, cell: ({ first }) => size(bytes[first]) },
  ];
  return simpleTable(`Which rank holds which elements of dim ${kind.dim}`, columns, kind.ranges);
}

function intervalBar(entries, kind) {
  const total = kind.shape[kind.dim];
  const name = kind.isShared ? 'shared' : 'sharded';
  const marks = entries.filter(Array.isArray).map(([start, stop]) => {
    const width = Math.max((1000 * (stop - start)) / total, 4);
    const x = Math.min((1000 * start) / total, 996);
    return graphic('rect', { x, y: 0, width, height: 10, class: `interval ${name}` });
  });
  const box = { viewBox: '0 0 1000 10', preserveAspectRatio: 'none' };
  return graphic('svg', { class: 'intervals', 'aria-hidden': 'true', ...box }, marks);
}
