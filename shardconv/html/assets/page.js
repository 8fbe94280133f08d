// The page: reads the data, and puts its sections in order.

function header({ plan, cost, verify }) {
  const kind = verify ? 'verification' : plan?.tp ? `plan for tp ${plan.tp}` : plan ? 'supported sizes' : 'cost';
  const name = (verify?.paths.join(', ') ?? plan?.source ?? cost.source).replace(/\/+$/, '');
  const title = element('h1', {}, breakable(name));
  return [element('p', { class: 'kind' }, `shardconv ${kind}`), title, figures(plan, verify)];
}

function figures(plan, verify) {
  if (!plan && !verify) return null;
  const ranks = (verify && chosenRanks(verify)) || String(plan ? plan.rank_bytes.length || '' : Math.max(verify.tp, verify.ep) * verify.pp);
  if (!plan) {
    const files = ['Rank files', size(verify.num_bytes)];
    return terms([['Ranks', ranks], ['Tensors', grouped(verify.num_tensors)], files], 'figures');
  }
  const most = plan.rank_bytes.length ? largestOf(plan.rank_bytes) : 0;
  return terms([
    ['Family', plan.family ?? 'none'],
    ['Tensors', grouped(plan.num_tensors)],
    ['Full size', size(plan.num_bytes)],
    ['Ranks', ranks],
    ['Pipeline stages', plan.stages.length ? `${plan.stages.join(', ')} layers` : null],
    ['Per rank', most ? spread(plan.rank_bytes) : null],
    ['Above an equal share', most ? excess(most, plan.num_bytes / plan.rank_bytes.length) : null],
    ['Layout', plan.layout === 'native' ? null : plan.layout],
    ['Boundaries', plan.engine],
    ['Quantized weights', plan.num_quantized ? grouped(plan.num_quantized) : null],
    ['Quantization', plan.quantization],
    ['Adapters', plan.adapters.join(', ')],
  ], 'figures');
}

/** What the reader has to know of a plan: assumptions, padding, files that are left out. */
function planNotes(plan, tensors, reason) {
  const notes = reason === null ? [] : [`Tensors and sizes are not shown: ${reason}`];
  if (plan) {
    notes.push(...plan.assumed.map((text) => `assumed: ${text}`));
    notes.push(...plan.quantized_blocks.map((text) => `quantized weights: ${text}`));
    const padded = plan.padding.units.map((unit) => `${unit.name} from ${unit.size} to ${unit.padded_size}`);
    notes.push(...padded.map((text) => `padded with zeros: ${text}`));
    notes.push(...Object.entries(plan.left_out).map(([name, why]) => `left out (${why}): ${name}`));
    if (!tensors) notes.push('Which rank holds which tensor depends on tp: the option --tp N adds it to the page.');
  }
  return notes.length ? section('notes', 'Notes', notesList(notes)) : null;
}

function sections({ plan, no_plan: reason, tensors, cost, verify, remedy }) {
  return [
    verify && verifySection(verify, remedy),
    planNotes(plan, tensors, reason),
    tensors && layersSection(plan, tensors.layers),
    tensors && tensorsSection(plan, tensors),
    plan && sizesSection(plan),
    (cost || plan?.supported_tp.length > 0) && curvesSection(plan, cost),
  ].filter(Boolean);
}

function links(found) {
  const link = (one) => element('a', { href: `#${one.id}` }, one.querySelector('h2').textContent);
  const items = found.map((one) => element('li', {}, link(one)));
  return element('nav', { 'aria-label': 'Sections' }, element('ul', {}, items));
}

function start() {
  const data = JSON.parse(document.getElementById('data').textContent);
  const found = sections(data);
  document.getElementById('head').append(...header(data).filter(Boolean), links(found));
  document.getElementById('content').append(...found);
  const note = `Written by shardconv ${data.version}. Sizes are in powers of ten. This page makes no request.`;
  document.getElementById('foot').append(note);
}

start();
