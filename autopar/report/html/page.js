"use strict";
(() => {
  const one = (query, from = document) => from.querySelector(query);
  const all = (query, from = document) => Array.from(from.querySelectorAll(query));

  // Light and dark: what the system says, until the button is pressed.
  const theme = one("#theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const sayTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.hidden = false;
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    sayTheme();
  });
  dark.addEventListener("change", sayTheme);
  sayTheme();

  // Links within the page: a notebook's frame would follow them out of it.
  for (const link of all('a[href^="#"]')) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const target = one(link.getAttribute("href"));
      target.tabIndex = -1;
      target.focus({ preventScroll: true });
      target.scrollIntoView();
    });
  }

  // Tables that sort: a row and the details below it, if any, move together.
  const valueOf = (body, column) => {
    const cell = body.rows[0].cells[column];
    return cell.dataset.value !== undefined ? cell.dataset.value : cell.textContent.trim();
  };
  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", { numeric: true }) : x - y;
  };
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      const button = one("button", head);
      if (!button) return;
      button.addEventListener("click", () => {
        // numbers from the largest on, words from A on
        const first = head.classList.contains("n") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const h of heads) if (h.hasAttribute("aria-sort")) h.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        const bodies = Array.from(table.tBodies);
        const pairs = bodies.filter((body) => !body.classList.contains("details")).map((body) => {
          const next = body.nextElementSibling;
          return [body, next && next.classList.contains("details") ? next : null, valueOf(body, column)];
        });
        pairs.sort((a, b) => (order === "ascending" ? 1 : -1) * compare(a[2], b[2]));
        for (const [body, details] of pairs) {
          table.append(body);
          if (details) table.append(details);
        }
      });
    });
  }

  // Layers that open, and the filter, which looks into closed ones too.
  const layers = one("#layers-table");
  const openers = all("button.open", layers);
  const toggle = (button, open) => {
    button.setAttribute("aria-expanded", String(open));
    document.getElementById(button.getAttribute("aria-controls")).classList.toggle("shown", open);
  };
  for (const button of openers) {
    button.addEventListener("click", () => toggle(button, button.getAttribute("aria-expanded") !== "true"));
  }
  const openAll = one("#open-all");
  openAll.addEventListener("click", () => {
    const open = openAll.getAttribute("aria-pressed") !== "true";
    openAll.setAttribute("aria-pressed", String(open));
    openAll.textContent = open ? "Close all" : "Open all";
    for (const button of openers) toggle(button, open);
  });
  const filter = one("#filter");
  const shown = one("#shown");
  const everything = shown.textContent;
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
    const has = (element) => words.every((word) => element.textContent.toLowerCase().includes(word));
    let count = 0;
    for (const body of all("tbody:not(.details)", layers)) {
      const next = body.nextElementSibling;
      const details = next && next.classList.contains("details") ? next : null;
      const within = details ? Array.from(details.rows).filter(has) : [];
      const itself = has(body);
      const found = itself || within.length > 0;
      body.hidden = !found;
      if (details) {
        details.hidden = !found;
        for (const row of details.rows) row.hidden = words.length > 0 && !itself && !within.includes(row);
      }
      count += found;
    }
    shown.textContent = words.length ? `${count} of ${everything}` : everything;
  });

  // What the pointer is over in the timeline.
  const tip = one("#tip");
  for (const row of all("svg.time .target")) {
    let data = null;
    row.addEventListener("pointermove", (event) => {
      data = data || JSON.parse(row.dataset.row);
      const [words, numbers] = data; // begin, width, words and micro-batch of every segment
      const svg = row.ownerSVGElement;
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width * 10;
      let said = "waits for other ranks";
      for (let i = 0; i < numbers.length; i += 4) {
        if (numbers[i] > x || x > numbers[i] + numbers[i + 1]) continue;
        said = (numbers[i + 3] < 0 ? "" : `micro-batch ${numbers[i + 3]}: `) + words[numbers[i + 2]];
      }
      tip.textContent = `rank ${row.dataset.rank}, ${said}`;
      tip.hidden = false;
      tip.style.left = `${Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${event.clientY + 16}px`;
    });
    row.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
})();
