// The supported tensor parallel sizes, and what blocks the others.

function sizesSection(plan) {
  const blocked = blockers(plan.blocked_tp);
  const rows = [{ state: 'Supported', sizes: rangesText(plan.supported_tp) || 'none', why: '' }];
  if (plan.padded_tp.length) {
    const memory = plan.padded_tp.map(({ tp, memory: more }) => `${tp} (+${percent(more)})`).join(', ');
    const list = element('details', {}, element('summary', {}, 'Additional memory of each size'), memory);
    rows.push({ state: 'With --pad', sizes: rangesText(plan.padded_tp.map(({ tp }) => tp)), why: list });
  }
  for (const { tps, tensor, reason } of blocked) {
    const why = [element('code', {}, breakable(tensor)), `: ${reason}`];
    rows.push({ state: plan.padded_tp.length ? 'Blocked without --pad' : 'Blocked', sizes: rangesText(tps), why });
  }
  const columns = [
    { label: 'State', cell: (row) => row.state, name: 'state' },
    { label: 'tp', cell: (row) => row.sizes, name: 'sizes' },
    { label: 'Why', cell: (row) => row.why, name: 'why' },
  ];
  if (!plan.supported_tp.length && !plan.blocked_tp.length) {
    const text = 'The manifest does not store the rules of the plan, so other sizes are not known.';
    return section('sizes', 'Supported sizes', element('p', {}, text));
  }
  return section('sizes', 'Supported sizes', strip(plan), simpleTable('Supported sizes', columns, rows));
}

/** Sizes that the same tensor blocks for the same reason, but for its numbers. */
function blockers(found) {
  const groups = new Map();
  for (const { tp, tensor, reason } of found) {
    const key = JSON.stringify([tensor, reason.replace(/\d+/g, '')]);
    if (!groups.has(key)) groups.set(key, { tps: [], tensor, reason });
    groups.get(key).tps.push(tp);
  }
  return [...groups.values()];
}

/** A cell per size, colored by its state; the table below it has the same in words. */
function strip(plan) {
  const states = new Map(plan.blocked_tp.map(({ tp }) => [tp, 'blocked']));
  for (const tp of plan.supported_tp) states.set(tp, 'supported');
  for (const { tp } of plan.padded_tp) states.set(tp, 'padded');
  const cells = [...states].sort(([a], [b]) => a - b).map(([tp, state]) => {
    const isPlan = tp === plan.tp ? ' current' : '';
    return element('span', { class: `${state}${isPlan}` }, String(tp));
  });
  const legend = [['supported', 'supported'], ['padded', 'with --pad'], ['blocked', 'not supported']];
  const used = legend.filter(([state]) => [...states.values()].includes(state));
  const keys = used.map(([state, label]) => element('li', {}, element('i', { class: state }), label));
  return element('div', { class: 'strip', 'aria-hidden': 'true' }, cells, element('ul', { class: 'legend' }, keys));
}
