// Tables: sorted by their headings, in pages, with rows that open.

const PAGE_ROWS = 100;
let tables = 0;

/** A table in a frame that scrolls sideways, also by the keyboard. */
function framed(label, table) {
  return element('div', { class: 'frame', role: 'group', 'aria-label': label, tabindex: '0' }, table);
}

/** A table of few rows. `columns` are `{ label, cell, numeric, wide }`; the first one names its row. */
function simpleTable(label, columns, rows) {
  const head = columns.map((column) => element('th', { scope: 'col', class: classOf(column) }, column.label));
  const body = rows.map((row) => element('tr', {}, columns.map((column, index) => cellOf(column, row, index))));
  const parts = [element('thead', {}, element('tr', {}, head)), element('tbody', {}, body)];
  return framed(label, element('table', {}, element('caption', { class: 'hidden' }, label), parts));
}

function classOf(column) {
  return [column.numeric && 'numeric', column.wide && 'wide', column.name].filter(Boolean).join(' ') || null;
}

function cellOf(column, row, index) {
  const attributes = { class: classOf(column) };
  if (index === 0) return element('th', { scope: 'row', ...attributes }, column.cell(row));
  return element('td', attributes, column.cell(row));
}

/** A labelled field for a search. */
function searchField(id, label, update) {
  const input = element('input', { type: 'search', id, autocomplete: 'off', spellcheck: 'false', oninput: update });
  return { input, node: element('div', { class: 'field grow' }, element('label', { for: id }, label), input) };
}

/** A table of many rows: `columns` that have a `key` can be sorted; `details` gives the content of an open row. */
class DataTable {
  constructor(label, columns, details) {
    this.columns = columns;
    this.details = details;
    this.sorted = { column: columns[0], descending: false };
    this.number = tables;
    tables += 1;
    this.headings = columns.map((column) => this.heading(column));
    this.body = element('tbody');
    const caption = element('caption', { class: 'hidden' }, `${label}; buttons in the headings sort`);
    const head = element('thead', {}, element('tr', {}, this.headings));
    this.table = element('table', {}, caption, head, this.body);
    this.pager = element('nav', { class: 'pager', 'aria-label': `Pages of ${label.toLowerCase()}` });
    this.position = element('span', { 'aria-live': 'polite' });
    this.back = element('div', { class: 'steps' });
    this.forth = element('div', { class: 'steps' });
    this.pager.append(this.back, this.position, this.forth);
    this.node = element('div', {}, framed(label, this.table), this.pager);
  }

  heading(column) {
    if (!column.key) return element('th', { scope: 'col', class: classOf(column) }, column.label);
    const button = element('button', { type: 'button', onclick: () => this.sort(column) }, column.label);
    return element('th', { scope: 'col', class: classOf(column) }, button);
  }

  /** Show rows, from the first page. */
  show(rows) {
    this.rows = rows;
    this.order();
  }

  sort(column) {
    const again = this.sorted.column === column;
    // sizes are most useful from the largest
    this.sorted = { column, descending: again ? !this.sorted.descending : Boolean(column.numeric) };
    this.order();
  }

  order() {
    const { column, descending } = this.sorted;
    const sign = descending ? -1 : 1;
    const keys = this.rows.map(column.key);
    const compared = (a, b) => (keys[a] < keys[b] ? -sign : keys[a] > keys[b] ? sign : a - b);
    const order = Uint32Array.from(keys, (_, index) => index).sort(compared);
    this.ordered = Array.from(order, (index) => this.rows[index]);
    this.headings.forEach((heading, index) => {
      const direction = descending ? 'descending' : 'ascending';
      if (this.columns[index] === column) heading.setAttribute('aria-sort', direction);
      else heading.removeAttribute('aria-sort');
    });
    this.page(0);
  }

  page(number) {
    const pages = Math.max(1, Math.ceil(this.ordered.length / PAGE_ROWS));
    const shown = this.ordered.slice(number * PAGE_ROWS, (number + 1) * PAGE_ROWS);
    this.body.replaceChildren(...shown.map((row, index) => this.row(row, index)));
    this.pager.hidden = pages === 1;
    const step = (label, to) => {
      const disabled = to < 0 || to >= pages || to === number;
      return element('button', { type: 'button', disabled, onclick: () => this.turn(label, to) }, label);
    };
    this.position.textContent = `Page ${grouped(number + 1)} of ${grouped(pages)}`;
    this.back.replaceChildren(step('First', 0), step('Previous', number - 1));
    this.forth.replaceChildren(step('Next', number + 1), step('Last', pages - 1));
  }

  /** Go to a page; the focus stays on the button, or goes to its neighbor where it is disabled. */
  turn(label, to) {
    this.page(to);
    const buttons = [...this.pager.querySelectorAll('button:enabled')];
    (buttons.find((button) => button.textContent === label) ?? buttons[0])?.focus();
  }

  row(row, index) {
    const node = element('tr', {}, this.columns.map((column, place) => cellOf(column, row, place)));
    if (this.details) this.addOpener(node, row, `details-${this.number}-${index}`);
    return node;
  }

  /** Make the first cell a button that opens the details of a row below it. */
  addOpener(node, row, id) {
    const first = node.firstElementChild;
    const toggle = () => {
      const isOpen = opener.getAttribute('aria-expanded') === 'true';
      opener.setAttribute('aria-expanded', String(!isOpen));
      if (isOpen) node.nextElementSibling.remove();
      else node.after(this.detailsRow(row, id));
    };
    const attributes = { type: 'button', class: 'opener', 'aria-expanded': 'false', 'aria-controls': id };
    const opener = element('button', { ...attributes, onclick: toggle }, ...first.childNodes);
    first.replaceChildren(opener);
  }

  detailsRow(row, id) {
    const cell = element('td', { colspan: String(this.columns.length) }, this.details(row));
    return element('tr', { class: 'details', id }, cell);
  }
}
