// Text that arrives in pieces. Draft tokens are tinted, and blocks between ``` lines become code.

import { highlight } from './highlight.js';

const FENCE = '```';

export class Text {
  constructor({ fences }) {
    this.element = document.createElement('div');
    this.element.className = 'text';
    this.fences = fences;
    this.block = this.element;
    this.run = null;
    this.held = []; // pieces of a line that may become a fence: [text, fromDraft]
    this.atLineStart = true;
  }

  add(text, fromDraft) {
    if (!this.fences) {
      this.append(text, fromDraft);
      return;
    }
    for (const line of text.split(/(?<=\n)/)) this.addLine(line, fromDraft);
  }

  // Adds a part of one line, at most up to its end.
  addLine(part, fromDraft) {
    if (!this.atLineStart) {
      this.append(part, fromDraft);
      this.atLineStart = part.endsWith('\n');
      return;
    }
    this.held.push([part, fromDraft]);
    const line = this.held.map(([text]) => text).join('');
    if (FENCE.startsWith(line) || (line.startsWith(FENCE) && !line.endsWith('\n'))) return;
    if (line.startsWith(FENCE)) {
      this.held = [];
      this.fence();
    } else {
      this.release();
      this.atLineStart = line.endsWith('\n');
    }
  }

  // Completes the text: an incomplete fence becomes text, and an open code block is coloured.
  finish() {
    const line = this.held.map(([text]) => text).join('');
    if (line === FENCE && this.block !== this.element) this.held = [];
    this.release();
    if (this.block !== this.element) highlight(this.block);
  }

  release() {
    for (const [text, fromDraft] of this.held.splice(0)) this.append(text, fromDraft);
  }

  // Begins or ends a block of code.
  fence() {
    this.run = null;
    if (this.block !== this.element) {
      highlight(this.block);
      this.block = this.element;
      return;
    }
    const block = document.createElement('pre');
    block.tabIndex = 0; // it scrolls, so the keyboard must reach it
    const frame = document.createElement('div');
    frame.className = 'code';
    frame.append(block, copyButton(() => block.textContent));
    this.element.append(frame);
    this.block = block;
  }

  append(text, fromDraft) {
    if (this.run === null || this.run.fromDraft !== fromDraft) {
      const span = document.createElement('span');
      if (fromDraft) span.className = 'draft';
      const node = document.createTextNode('');
      span.append(node);
      this.block.append(span);
      this.run = { node, fromDraft };
    }
    this.run.node.appendData(text);
  }
}

// Returns a button that copies the text that `text` returns.
export function copyButton(text) {
  const button = document.createElement('button');
  button.type = 'button';
  button.className = 'quiet copy';
  button.textContent = 'Copy';
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = 'Copied';
    } catch {
      button.textContent = 'Copy failed'; // copying needs HTTPS or localhost
    }
    setTimeout(() => (button.textContent = 'Copy'), 1500);
  });
  return button;
}
