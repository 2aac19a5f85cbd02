// Colours code with the CSS Custom Highlight API. It colours ranges of the text and adds no
// elements, so the tint of draft tokens stays. Browsers without the API show plain code.

const KEYWORDS = (
  'and as assert async await bool break case catch char class const continue def default del do ' +
  'double elif else enum except export extends False false final finally float fn for from func ' +
  'function global if impl import in int interface is lambda let long match mod move mut new nil ' +
  'None not null nullptr or package pass pub public private protected raise ref return self Self ' +
  'short static str string struct super switch template this throw trait True true try type ' +
  'typedef typeof undefined union unsafe unsigned use using var virtual void where while with yield'
).split(' ');

const PATTERN = new RegExp(
  [
    String.raw`(?<comment>#(?![0-9a-fA-F]{3,8}\b)[^\n]*|//[^\n]*|/\*[\s\S]*?(?:\*/|$))`,
    String.raw`(?<string>"""[\s\S]*?(?:"""|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)`,
    String.raw`(?<number>\b(?:0x[0-9a-fA-F]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b)`,
    String.raw`(?<keyword>\b(?:${KEYWORDS.join('|')})\b)`,
  ].join('|'),
  'g',
);

// Colours the text of an element. The text must be complete.
export function highlight(element) {
  if (!globalThis.CSS?.highlights) return;
  const nodes = textNodes(element);
  for (const match of element.textContent.matchAll(PATTERN)) {
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    const range = new Range();
    range.setStart(...placeOf(nodes, match.index, true));
    range.setEnd(...placeOf(nodes, match.index + match[0].length, false));
    const name = `code-${kind}`;
    if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
    CSS.highlights.get(name).add(range);
  }
}

// Returns the text nodes of an element, each with the offset of its first character.
function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const nodes = [];
  for (let offset = 0; walker.nextNode(); offset += walker.currentNode.length) {
    nodes.push([walker.currentNode, offset]);
  }
  return nodes;
}

// Returns the text node at an offset, and the offset within it. Between two nodes, the start of a
// range is in the later one and its end is in the earlier one.
function placeOf(nodes, offset, isStart) {
  for (const [node, first] of nodes) {
    const place = offset - first;
    if (place < node.length || (!isStart && place === node.length)) return [node, place];
  }
  const [node] = nodes.at(-1);
  return [node, node.length];
}
