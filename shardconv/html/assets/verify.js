// The result of a verification: the checks, and the differences.

function verdict(report, remedy) {
  const number = report.differences.length;
  if (number) return { name: 'bad', text: counted(number, 'difference'), more: remedy };
  if (report.has_checksums || report.is_compared) return { name: 'good', text: 'Correct', more: '' };
  const more = 'without checksums most would not show: --against SRC compares every byte';
  return { name: 'unsure', text: 'No difference found', more };
}

/** The ranks whose files the folder has, where they are not all. */
function chosenRanks({ ranks, tp, pp }) {
  if (ranks.length === tp * pp) return '';
  return `rank${ranks.length === 1 ? '' : 's'} ${rangesText(ranks)} of ${tp * pp}`;
}

function verifySection(report, remedy) {
  const { name, text, more } = verdict(report, remedy);
  const result = element('strong', {}, [text, chosenRanks(report)].filter(Boolean).join(', '));
  const shown = element('p', { class: `verdict ${name}` }, result, more ? `: ${more}` : '');
  const found = [checksTable(report), warnings(report), differencesTable(report)];
  return section('verification', 'Verification', shown, found);
}

// The differences that each check finds, by their text; those of an adapter start with the name of its check.
const FOUND_BY = [
  [/^auxiliary files$/, /: differs from its checksum|: is missing, (not a regular file|or differs from the index)/],
  [/^checksums$/, /: the bytes of .* differ from their checksum/],
  [/^replicas$/, /expected equal replicas/],
  [/^padding$/, /: the padding of .* is not zero/],
  [/every tensor of /, /: byte \d+ of the tensor differs from the source/],
];

/** The check that finds a difference; null for one that no check is named for. */
function foundBy(difference, checked) {
  const adapter = checked.find((check) => check.startsWith('adapter ') && difference.startsWith(`${check}: `));
  if (adapter) return adapter;
  const names = FOUND_BY.filter(([, text]) => text.test(difference)).map(([name]) => name);
  return checked.find((check) => names.some((name) => name.test(check))) ?? null;
}

function checksTable(report) {
  const columns = [
    { label: 'Check', cell: ({ check }) => breakable(check) },
    { label: 'Result', cell: resultMark },
  ];
  return simpleTable('Checks', columns, [...doneChecks(report), ...missingChecks(report)]);
}

/** The checks that were made; a last one has the differences that are not found by one of them. */
function doneChecks({ checked, differences }) {
  const found = differences.map((difference) => foundBy(difference, checked));
  const numberOf = (check) => found.filter((each) => each === check).length;
  const failed = (check, number) => ({ check, result: 'failed', note: counted(number, 'difference') });
  const done = checked.map((check) => {
    if (numberOf(check)) return failed(check, numberOf(check));
    return { check, result: differences.length ? 'done' : 'passed', note: '' };
  });
  return numberOf(null) ? [...done, failed('other comparisons', numberOf(null))] : done;
}

const RESULTS = { passed: 'passed', done: 'no difference found', failed: 'failed', missing: 'not made' };

function resultMark({ result, note }) {
  return [element('span', { class: result }, RESULTS[result]), note ? `: ${note}` : null];
}

function missingChecks({ has_checksums: hasChecksums, is_compared: isCompared, external_layout: externalLayout, against }) {
  const missing = [];
  if (!hasChecksums) {
    const origin = externalLayout ? `files of ${externalLayout}` : 'split with --no-checksums';
    missing.push({ check: 'checksums', result: 'missing', note: `there are none: ${origin}` });
  }
  if (!isCompared) {
    const check = against === null ? 'every tensor of the source' : `every tensor of ${against}`;
    const note = against === null ? '--against SRC compares them' : 'the tensors or the rank files differ';
    missing.push({ check, result: 'missing', note });
  }
  return missing;
}

function warnings(report) {
  const others = report.other_weights.map((name) => `${name}: in the folder, but not part of this split checkpoint`);
  const left = Object.entries(report.left_out).map(([name, reason]) => `left out (${reason}): ${name}`);
  return notesList([...others, ...left]);
}

function differencesTable({ differences }) {
  if (!differences.length) return null;
  const rows = differences.map(differenceRow);
  const columns = [
    { label: 'File or tensor', cell: ({ where }) => element('code', {}, breakable(where)), key: ({ order }) => order },
    { label: 'Difference', cell: ({ what }) => breakable(what), key: ({ what }) => what },
  ];
  const table = new DataTable('Differences', columns, null);
  const status = element('p', { role: 'status', class: 'status' });
  const update = () => {
    const words = search.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(({ text }) => words.every((word) => text.includes(word)));
    table.show(found);
    status.textContent = `${grouped(found.length)} of ${counted(rows.length, 'difference')}`;
  };
  const search = searchField('search-differences', 'Search differences', update);
  update();
  const attributes = { class: 'controls', role: 'search', 'aria-label': 'Differences' };
  return [element('h3', {}, 'Differences'), element('div', attributes, search.node, status), table.node];
}

/** A difference with the file or tensor before its first colon. */
function differenceRow(text) {
  const end = text.indexOf(': ');
  const [where, what] = end < 0 ? ['', text] : [text.slice(0, end), text.slice(end + 2)];
  return { where, what, order: sortKey(text), text: text.toLowerCase() };
}
