// One turn of a conversation: its text, and the elements that show it.
//
// A turn is { role, reasoning, content, note, error }; reasoning and content are lists of
// [text, fromDraft]. All text becomes text nodes, never HTML.

import { copyButton, Text } from './text.js';

const NAMES = { user: 'You', assistant: 'Model' };

export function newTurn(role, text = '') {
  return { role, reasoning: [], content: text ? [[text, false]] : [], note: '', error: '' };
}

export function textOf(pieces) {
  return pieces.map(([text]) => text).join('');
}

export class TurnView {
  constructor(turn, { fences, retry }) {
    this.turn = turn;
    this.fences = fences;
    this.retry = retry;
    this.element = made('article', `turn ${turn.role}`);
    this.element.append(made('p', 'who', NAMES[turn.role]));
    this.places = {};
    for (const kind of ['reasoning', 'content']) {
      for (const piece of turn[kind]) this.show(kind, ...piece);
    }
    this.finish();
  }

  // Appends text of a kind, 'reasoning' or 'content'.
  add(kind, text, fromDraft) {
    const pieces = this.turn[kind];
    const last = pieces.at(-1);
    if (last && last[1] === fromDraft) last[0] += text;
    else pieces.push([text, fromDraft]);
    this.show(kind, text, fromDraft);
  }

  show(kind, text, fromDraft) {
    this.places[kind] ??= this.place(kind);
    this.places[kind].add(text, fromDraft);
  }

  place(kind) {
    const text = new Text({ fences: this.fences && kind === 'content' });
    if (kind === 'content') {
      this.element.append(text.element);
      return text;
    }
    const folded = made('details', '');
    folded.append(made('summary', '', 'Reasoning'), text.element);
    this.element.insertBefore(folded, this.places.content?.element ?? null);
    return text;
  }

  // Completes the turn: shows its note, its error, and the buttons below an answer.
  finish() {
    this.element.classList.remove('open');
    for (const text of Object.values(this.places)) text.finish();
    if (this.turn.error) {
      const error = made('p', 'error', this.turn.error);
      error.setAttribute('role', 'alert');
      this.element.append(error);
    }
    if (this.turn.note) this.element.append(made('p', 'note', this.turn.note));
    if (this.turn.role === 'assistant') this.element.append(this.actions());
  }

  // Returns the buttons that copy and retry an answer. The style sheet shows the second one below
  // the last turn only.
  actions() {
    const actions = made('p', 'actions');
    const retry = made('button', 'quiet retry', 'Retry');
    retry.type = 'button';
    retry.addEventListener('click', () => this.retry?.());
    actions.append(copyButton(() => textOf(this.turn.content)), retry);
    return actions;
  }

  // Marks the turn as streaming.
  open() {
    this.element.classList.add('open');
    this.element.querySelector('.actions')?.remove();
    if (!this.places.content && !this.places.reasoning) this.places.content = this.place('content');
  }
}

export function made(tag, name, text = '') {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text) element.textContent = text;
  return element;
}
