// Text that grows: pieces of the draft are tinted, blocks between ``` lines stand as code.

const FENCE = '```';

export class Text {
  constructor({ fences }) {
    this.element = document.createElement('div');
    this.element.className = 'text';
    this.fences = fences;
    this.block = this.element;
    this.run = null;
    this.held = []; // of a line that may become a fence: [text, fromDraft]
    this.atLineStart = true;
  }

  add(text, fromDraft) {
    if (!this.fences) {
      this.append(text, fromDraft);
      return;
    }
    for (const line of text.split(/(?<=\n)/)) this.addLine(line, fromDraft);
  }

  // Part of one line, at most up to its end.
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

  // No more comes.
  finish() {
    const line = this.held.map(([text]) => text).join('');
    if (line === FENCE && this.block !== this.element) this.held = [];
    this.release();
  }

  release() {
    for (const [text, fromDraft] of this.held.splice(0)) this.append(text, fromDraft);
  }

  // A block of code begins or ends.
  fence() {
    this.run = null;
    if (this.block !== this.element) {
      this.block = this.element;
      return;
    }
    this.block = document.createElement('pre');
    this.block.tabIndex = 0; // it scrolls, so a keyboard has to reach it
    this.element.append(this.block);
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
