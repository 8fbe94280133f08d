// Curves over tensor parallel sizes, on logarithmic axes: half the bytes per rank at twice the size is a straight line.

const CHART = { height: 240, left: 64, right: 14, top: 12, bottom: 28 };

/**
 * A chart that is drawn again where its width changes.
 * `series` are `{ label, values, name }`, with a value for each of `sizes` or null. Without values above 0 there is none.
 */
function lineChart(label, sizes, series, format) {
  const shown = series.filter(({ values }) => values.some((value) => value > 0));
  if (!shown.length) return null;
  const legend = shown.map(({ label: text, name }) => {
    const sample = graphic('line', { x1: 0, x2: 26, y1: 5, y2: 5, class: `line ${name}` });
    return element('li', {}, graphic('svg', { width: 26, height: 10, 'aria-hidden': 'true' }, sample), text);
  });
  const canvas = element('div', { class: 'canvas' });
  const draw = () => canvas.replaceChildren(drawing(label, sizes, shown, format, canvas.clientWidth || 600));
  new ResizeObserver(draw).observe(canvas);
  const key = element('ul', { class: 'legend' }, legend);
  return element('figure', { class: 'chart' }, element('figcaption', {}, label), key, canvas);
}

function drawing(label, sizes, series, format, width) {
  const values = series.flatMap((one) => one.values).filter((value) => value > 0);
  const ticks = tickValues(Math.min(...values), Math.max(...values));
  const position = axes(sizes, ticks, width);
  const parts = [yAxis(ticks, position, format, width), xAxis(sizes, position)];
  for (const one of series) parts.push(curve(sizes, one, position, format));
  const attributes = { viewBox: `0 0 ${width} ${CHART.height}`, width, height: CHART.height, role: 'img' };
  return graphic('svg', { ...attributes, 'aria-label': `${label}. The table below has the figures.` }, parts);
}

/** The functions from a size and a value to a position. */
function axes(sizes, ticks, width) {
  const scale = (value, low, high, from, to) => {
    const part = high > low ? Math.log(value / low) / Math.log(high / low) : 0.5;
    return Number((from + part * (to - from)).toFixed(1));
  };
  const { left, right, top, bottom, height } = CHART;
  return {
    x: (tp) => scale(tp, sizes[0], sizes[sizes.length - 1], left + 8, width - right - 8),
    y: (value) => scale(value, ticks[0], ticks[ticks.length - 1], height - bottom, top),
  };
}

/** Values of 1, 2 and 5 times a power of ten around a range; powers of ten alone where the range is wide. */
function tickValues(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 3 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const step of steps) found.push(Number(`${step}e${power}`));
  }
  const first = found.findLastIndex((tick) => tick <= low);
  const last = found.findIndex((tick) => tick >= high);
  return found.slice(Math.max(first, 0), last + 1);
}

function yAxis(ticks, { y }, format, width) {
  return ticks.map((tick) => [
    graphic('line', { x1: CHART.left, x2: width - CHART.right, y1: y(tick), y2: y(tick), class: 'rule' }),
    graphic('text', { x: CHART.left - 8, y: y(tick) + 4, 'text-anchor': 'end' }, format(tick)),
  ]);
}

/** Sizes below the chart, without labels that would touch another. */
function xAxis(sizes, { x }) {
  const base = CHART.height - CHART.bottom;
  let free = -Infinity;
  const labels = sizes.map((tp) => {
    if (x(tp) < free) return null;
    free = x(tp) + 10 + 8 * String(tp).length;
    return graphic('text', { x: x(tp), y: base + 20, 'text-anchor': 'middle' }, String(tp));
  });
  const title = graphic('text', { x: CHART.left - 8, y: base + 20, 'text-anchor': 'end' }, 'tp');
  return [labels, title];
}

function curve(sizes, { label, values, name }, { x, y }, format) {
  const points = sizes.flatMap((tp, index) => (values[index] > 0 ? [{ tp, value: values[index] }] : []));
  const path = points.map(({ tp, value }, index) => `${index ? 'L' : 'M'}${x(tp)} ${y(value)}`).join('');
  const dots = points.map(({ tp, value }) => {
    const title = graphic('title', {}, `tp ${tp}: ${label} ${format(value)}`);
    return graphic('circle', { cx: x(tp), cy: y(value), r: 3, class: `dot ${name}` }, title);
  });
  return [graphic('path', { d: path, class: `line ${name}` }), name === 'ideal' ? [] : dots];
}
