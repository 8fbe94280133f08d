// Bytes per rank and layer.

/** The columns of `Held`, with the words and colors for them. */
const HELD = [
  { name: 'sharded', label: 'Sharded' },
  { name: 'shared', label: 'Partly replicated' },
  { name: 'replicated', label: 'Replicated' },
  { name: 'padding', label: 'Padding' },
];

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

/** The largest number, of any number of them: a call has a limited number of arguments. */
function largestOf(numbers) {
  return numbers.reduce((a, b) => Math.max(a, b), 0);
}

/** The columns that are not 0 everywhere. */
function usedColumns(values) {
  const columns = HELD.map((held, column) => ({ ...held, column }));
  return columns.filter(({ column }) => values.some((value) => value[column]));
}

function layersSection(plan, layers) {
  const rows = layers.map(layerRow);
  const totals = rankTotals(rows, plan.rank_bytes.length);
  const used = usedColumns(totals.map(({ value }) => value));
  const largest = largestOf(rows.map(({ most }) => sum(most)));
  const table = new DataTable('Layers', layerColumns(used, largest), layerDetails);
  table.show(rows);
  const keys = used.map(({ name, label }) => element('li', {}, element('i', { class: name }), label));
  const legend = element('ul', { class: 'legend' }, keys);
  return section('layers', 'Bytes per rank and layer', rankSummary(totals), legend, table.node);
}

/** Consecutive layers with equal tensors: what each rank holds of all of them, and the rank that holds most. */
function layerRow(layer) {
  const count = layer.first === null ? 1 : layer.last - layer.first + 1;
  const ranks = layer.ranks.map(([held, number]) => [held.map((bytes) => bytes * count), number]);
  const most = ranks.map(([held]) => held).reduce((a, b) => (sum(b) > sum(a) ? b : a));
  return { ...layer, count, ranks, most };
}

/** What each rank holds, and a way to the tensors of these layers. */
function layerDetails({ name, first, last, ranks }) {
  const search = document.getElementById('search');
  const show = () => {
    search.value = first === null ? name : `${name.slice(0, -1)}${first === last ? first : `{${first}..${last}}`}.`;
    search.dispatchEvent(new Event('input'));
    search.focus();
  };
  return [rankTable(ranks), element('button', { type: 'button', class: 'plain', onclick: show }, 'Search its tensors')];
}

/** The bytes of all layers on each rank, for ranges of equal ranks. */
function rankTotals(rows, count) {
  const ranks = Array.from({ length: count }, () => [0, 0, 0, 0]);
  for (const layer of rows) {
    for (const { value, first, last } of rankRanges(layer.ranks)) {
      for (let rank = first; rank <= last; rank += 1) {
        ranks[rank] = ranks[rank].map((total, column) => total + value[column]);
      }
    }
  }
  const found = [];
  ranks.forEach((value, rank) => {
    const last = found[found.length - 1];
    if (last && String(last.value) === String(value)) last.last = rank;
    else found.push({ value, first: rank, last: rank });
  });
  return found;
}

function rankSummary(totals) {
  if (totals.length > 1) return rankTable(totals.map(({ value, first, last }) => [value, last - first + 1]));
  const [{ value }] = totals;
  const parts = usedColumns([value]).map(({ label, column }) => `${size(value[column])} ${label.toLowerCase()}`);
  const text = `Every rank holds ${size(sum(value))}: ${parts.join(', ')}.`;
  return element('div', {}, element('p', {}, text), bar(value, sum(value)));
}

/** What each rank holds, with a row for equal ranks that follow each other. */
function rankTable(runs) {
  const used = usedColumns(runs.map(([value]) => value));
  const largest = largestOf(runs.map(([value]) => sum(value)));
  const columns = [
    { label: 'Ranks', cell: (row) => ranksText(row) },
    { label: 'Each holds', numeric: true, cell: ({ value }) => size(sum(value)) },
    ...used.map(({ label, column }) => ({ label, numeric: true, cell: ({ value }) => size(value[column]) })),
    { label: 'Share', wide: true, name: 'bars', cell: ({ value }) => bar(value, largest) },
  ];
  return simpleTable('Bytes per rank', columns, rankRanges(runs));
}

function layerColumns(used, full) {
  const wide = (label, key, text) => ({ label, numeric: true, wide: true, key, cell: (row) => text(key(row)) });
  const largest = (column) => ({ ranks }) => largestOf(ranks.map(([held]) => held[column]));
  const perRank = ({ ranks }) => spread(ranks.map(([held]) => sum(held)));
  return [
    { label: 'Layer', cell: layerName, key: ({ name, first }) => sortKey(`${name}.${first ?? ''}`) },
    wide('Layers', ({ count }) => count, grouped),
    wide('Tensors', (row) => row.num_tensors * row.count, grouped),
    wide('Full', (row) => row.num_bytes * row.count, size),
    wide('Per rank and layer', ({ most, count }) => sum(most) / count, size),
    { label: 'Per rank', numeric: true, cell: perRank, key: ({ most }) => sum(most) },
    ...used.map(({ label, column }) => wide(label, largest(column), size)),
    { label: 'Share', name: 'bars', cell: ({ most }) => bar(most, full) },
  ];
}

/** One size, or the range of different ones. */
function spread(sizes) {
  const [low, high] = [size(Math.min(...sizes)), size(Math.max(...sizes))];
  return low === high ? low : `${low} to ${high}`;
}

function layerName({ name, first, last }) {
  const text = first === null ? name : name.slice(0, -1) + rangeText(first, last);
  return element('code', {}, breakable(text));
}

/** A bar of the bytes on a rank; the cells beside it have the figures. */
function bar(held, largest) {
  const parts = HELD.map(({ name }, column) => {
    const width = `${(100 * held[column]) / (largest || 1)}%`;
    return held[column] ? element('span', { class: name, style: { width } }) : null;
  });
  return element('div', { class: 'bar', 'aria-hidden': 'true' }, parts);
}
