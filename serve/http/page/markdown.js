// Converts a model's text to DOM nodes: paragraphs, headings, lists, code, bold and italics. Nodes
// are made with createElement and textContent only, so no text is interpreted as HTML. Links and
// images are shown as they are written.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]{0,30})/;
const ITEM = /^( {0,8})(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
// The lengths are bounded, so that matching takes linear time for every text.
const INLINE = /`([^`]{1,400})`|\*\*(?=\S)([^*]{1,400})\*\*|\*(?=[^\s*])([^*]{1,400})\*(?!\*)/;

/** Makes an element with attributes and children, which are text or elements. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(attribute, value);
  }
  node.append(...children);
  return node;
}

/** Returns the blocks [{kind, source, ...}] of a text; the last one may still grow. */
export function blocks(text) {
  const found = [];
  let lines = [];
  let fence = null;
  const flush = () => {
    if (lines.length) found.push({ kind: "text", source: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && mark[1].startsWith(fence.mark) && line.trim() === mark[1]) {
        found.push({ kind: "code", source: lines.join("\n"), language: fence.language });
        lines = [];
        fence = null;
      } else lines.push(line);
    } else if (mark) {
      flush();
      fence = { mark: mark[1], language: mark[2] };
    } else if (line.trim() === "") flush();
    else if (HEADING.test(line)) {
      flush();
      found.push({ kind: "heading", source: line });
    } else if (lines.length && ITEM.test(line) && !ITEM.test(lines[0])) {
      flush();
      lines.push(line);
    } else lines.push(line);
  }
  if (fence) found.push({ kind: "code", source: lines.join("\n"), language: fence.language });
  else flush();
  return found;
}

function inline(parent, text) {
  let rest = text;
  while (rest) {
    const match = INLINE.exec(rest);
    if (!match) break;
    parent.append(rest.slice(0, match.index));
    if (match[1]) parent.append(el("code", {}, match[1]));
    else if (match[2]) parent.append(inline(el("strong"), match[2]));
    else parent.append(inline(el("em"), match[3]));
    rest = rest.slice(match.index + match[0].length);
  }
  parent.append(rest);
  return parent;
}

function paragraph(source) {
  const node = el("p");
  source.split("\n").forEach((line, index) => {
    if (index) node.append(el("br"));
    inline(node, line.trim());
  });
  return node;
}

function list(source) {
  let node = null;
  let item = null;
  for (const line of source.split("\n")) {
    const match = ITEM.exec(line);
    if (match) {
      node ??= el(match[2] ? "ol" : "ul", match[2] ? { start: match[2] } : {});
      item = inline(el("li"), match[3]);
      if (match[1].length > 1) item.className = "inner";
      node.append(item);
    } else {
      item.append(el("br"));
      inline(item, line.trim());
    }
  }
  return node;
}

function code({ source, language }) {
  const copy = el("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.addEventListener("click", () => copyText(source, copy));
  const head = el("div", { class: "code-head" }, el("span", {}, language || "code"), copy);
  const body = el("pre", { tabindex: "0" }, el("code", {}, source));
  return el("div", { class: "code" }, head, body);
}

function render(block) {
  if (block.kind === "code") return code(block);
  if (block.kind === "heading") {
    const [, marks, text] = HEADING.exec(block.source);
    return inline(el(`h${Math.min(6, marks.length + 2)}`), text);
  }
  return ITEM.test(block.source.split("\n", 1)[0]) ? list(block.source) : paragraph(block.source);
}

/** Shows a growing text; only the blocks that have changed are made again. */
export class Shown {
  constructor(parent) {
    this.parent = parent;
    this.known = [];
  }

  update(text) {
    const now = blocks(text).map((block) => ({ ...block, id: `${block.kind}\n${block.language}\n${block.source}` }));
    now.forEach((block, index) => {
      if (this.known[index] === block.id) return;
      const node = render(block);
      const old = this.parent.children[index];
      if (old) old.replaceWith(node);
      else this.parent.append(node);
    });
    while (this.parent.children.length > now.length) this.parent.lastElementChild.remove();
    this.known = now.map((block) => block.id);
  }
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => {
    button.textContent = before;
  }, 1200);
}
