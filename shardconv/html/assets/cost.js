// Memory and communication over tensor parallel sizes.

function curvesSection(plan, cost) {
  const parts = cost ? costParts(cost) : weightParts(plan);
  return section('curves', cost ? 'Memory and communication over tp' : 'Memory over tp', parts);
}

/** The weights alone, which the headers give. */
function weightParts(plan) {
  const sizes = plan.supported_tp;
  const bytes = plan.supported_bytes;
  const ideal = sizes.map((tp) => plan.num_bytes / tp);
  const series = [
    { label: 'weights of the rank that has most', name: 'weights', values: bytes },
    { label: 'an equal share: full size ÷ tp', name: 'ideal', values: ideal },
  ];
  const columns = [
    { label: 'tp', cell: ({ tp }) => String(tp) },
    { label: 'Weights per rank', numeric: true, cell: ({ index }) => size(bytes[index]) },
    { label: 'Above an equal share', numeric: true, cell: ({ index }) => excess(bytes[index], ideal[index]) },
  ];
  const rows = sizes.map((tp, index) => ({ tp, index }));
  const table = simpleTable('Weights per rank over tp', columns, rows);
  const text = 'Cache, activations and communication are not counted here: the option --cost of shardconv plan '
    + 'adds them to the page. It needs torch and transformers.';
  const chart = sizes.length > 1 ? lineChart('Weights per rank', sizes, series, size) : null;
  return [element('div', { class: 'charts' }, chart, table), element('p', { class: 'note' }, text)];
}

/** What a rank has above an equal share of the full size, which may be nothing. */
function excess(bytes, share) {
  return percent(share ? bytes / share - 1 : 0);
}

function costParts(cost) {
  const { costs } = cost;
  const sizes = costs.map(({ tp }) => tp);
  const curve = (label, name, value) => ({ label, name, values: costs.map(value) });
  const memory = [
    curve('total', 'total', (one) => one.memory_bytes),
    curve('weights', 'weights', (one) => one.weight_bytes),
    curve('cache', 'cache', (one) => one.cache_bytes),
    curve('activations', 'activations', (one) => one.activation_bytes),
  ];
  const time = [
    curve('all prompts', 'prefill', (one) => one.prefill?.seconds ?? null),
    curve('next token of each prompt', 'decode', (one) => one.decode?.seconds ?? null),
  ];
  const charts = sizes.length > 1 && [
    lineChart('Memory per rank', sizes, memory, size),
    lineChart('Time of communication', sizes, time, duration),
  ];
  const settings = [element('p', {}, costSettings(cost)), notesList(cost.notes)];
  return [settings, element('div', { class: 'charts' }, charts), costTable(costs), notCounted(costs)];
}

function costSettings({ model, batch, seq, dtype, link }) {
  const speed = link.beta ? `${size(1 / link.beta)}/s` : 'infinite bandwidth';
  const run = `${model ?? 'No model class'}, ${counted(batch, 'prompt')} of ${counted(seq, 'token')} in ${dtype}`;
  const times = 'Times: communication only; ring collectives; upper bound.';
  return `${run}; link of ${duration(link.alpha)} per message and ${speed}. ${times}`;
}

function notesList(notes) {
  return notes.length ? element('ul', { class: 'notes' }, notes.map((note) => element('li', {}, note))) : null;
}

function costTable(costs) {
  const bytes = (value) => (value === null ? 'not counted' : size(value));
  const sent = (traffic) => (traffic ? size(traffic.sent_bytes) : 'not counted');
  const seconds = (traffic) => (traffic ? duration(traffic.seconds) : 'not counted');
  const columns = [
    { label: 'tp', cell: ({ tp }) => String(tp) },
    { label: 'Weights', numeric: true, cell: (one) => bytes(one.weight_bytes) },
    { label: 'Cache', numeric: true, cell: (one) => bytes(one.cache_bytes) },
    { label: 'Activations', numeric: true, cell: (one) => bytes(one.activation_bytes) },
    { label: 'Total', numeric: true, cell: (one) => bytes(one.memory_bytes) },
    { label: 'Sent per token', numeric: true, cell: (one) => sent(one.decode) },
    { label: 'Time', numeric: true, cell: (one) => seconds(one.decode) },
    { label: 'Sent for prompts', numeric: true, cell: (one) => sent(one.prefill) },
    { label: 'Time', numeric: true, cell: (one) => seconds(one.prefill) },
  ];
  return simpleTable('Memory and communication per rank over tp', columns, costs);
}

function notCounted(costs) {
  const reasons = new Map();
  for (const { tp, not_counted: reason } of costs) {
    if (reason !== null) reasons.set(reason, [...(reasons.get(reason) ?? []), tp]);
  }
  const text = ([reason, tps]) => `Only weights are counted for tp ${rangesText(tps)}: ${reason}`;
  return notesList([...reasons].map(text));
}
