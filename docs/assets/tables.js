// A page with a long table: a filter for its tables from there on, and headers that sort. Without JavaScript the tables
// are complete.
(() => {
  "use strict";

  const LONG = 40; // rows

  /** The text of a cell, and its number where it begins with one. */
  const value = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => (/^[-+]?[\d.]/.test(text) ? parseFloat(text) : NaN);

  /** Compare two texts: numbers by value, empty cells last. */
  const compare = (a, b) => {
    if (!a || !b) return Number(!a) - Number(!b);
    const [x, y] = [number(a), number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en") : x - y;
  };

  const sort = (table, header) => {
    const direction = header.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    for (const other of header.parentElement.cells) other.setAttribute("aria-sort", "none");
    header.setAttribute("aria-sort", direction);
    const [column, sign] = [header.cellIndex, direction === "ascending" ? 1 : -1];
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [value(a, column), value(b, column)];
      return x && y ? sign * compare(x, y) : compare(x, y);
    });
    table.tBodies[0].append(...rows);
  };

  const makeSortable = (table) => {
    for (const header of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      button.addEventListener("click", () => sort(table, header));
      header.append(button);
      header.setAttribute("aria-sort", "none");
    }
  };

  /** Show the rows that contain every word, and say how many they are. */
  const filter = (tables, text, status) => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let [shown, all] = [0, 0];
    for (const table of tables) {
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const content = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => content.includes(word));
      }
      const found = rows.filter((row) => !row.hidden).length;
      table.hidden = found === 0;
      [shown, all] = [shown + found, all + rows.length];
    }
    status.textContent = words.length ? `${shown} of ${all} rows` : `${all} rows`;
  };

  const addFilter = (tables, place) => {
    const form = document.createElement("form");
    const [label, input, status] = ["label", "input", "output"].map((name) => document.createElement(name));
    form.className = "table-filter";
    form.addEventListener("submit", (event) => event.preventDefault());
    input.type = "search";
    input.id = "table-filter";
    label.htmlFor = status.htmlFor = input.id;
    label.textContent = "Filter rows";
    input.addEventListener("input", () => filter(tables, input.value, status));
    form.append(label, input, status);
    place.before(form);
    filter(tables, "", status);
  };

  document.addEventListener("DOMContentLoaded", () => {
    const sections = document.querySelector("article h2");
    const follows = (table) => sections && sections.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING;
    const tables = [...document.querySelectorAll("article table")].filter((table) => table.tHead && follows(table));
    if (!tables.some((table) => table.tBodies[0].rows.length >= LONG)) return;
    tables.forEach(makeSortable);
    addFilter(tables, sections);
  });
})();
