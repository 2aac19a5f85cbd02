// Speed of one answer, and tokens per forward pass of the model.

export class Figures {
  constructor({ drafts }) {
    this.drafts = drafts; // without a draft, every pass gives one token
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.atFirst = 0;
    this.tokens = 0;
    this.passes = 0;
  }

  // Adds a chunk. Its tokens come either from the draft or from the model. The model adds one token
  // per forward pass.
  take({ token_count: tokens, from_draft: fromDraft }) {
    if (!tokens) return;
    this.last = performance.now();
    this.tokens += tokens;
    if (!fromDraft) this.passes += tokens;
    if (this.first === null) {
      this.first = this.last;
      this.atFirst = tokens;
    }
  }

  get speed() {
    const passed = (this.last - this.first) / 1000;
    return passed > 0 ? (this.tokens - this.atFirst) / passed : null;
  }

  get acceptance() {
    return this.passes ? this.tokens / this.passes : null;
  }

  // Each value as text.
  get shown() {
    return {
      speed: number(this.speed, this.speed < 10 ? 1 : 0),
      acceptance: number(this.acceptance, 2),
      first: this.first === null ? '–' : duration(this.first - this.begun),
      count: this.tokens ? String(this.tokens) : '–',
    };
  }

  // The line below the answer.
  get note() {
    if (!this.tokens) return '';
    const { speed, acceptance, first } = this.shown;
    const passes = this.drafts ? ` · ${acceptance} tokens/step` : '';
    return `${this.tokens} tokens · ${speed} tokens/s${passes} · TTFT ${first}`;
  }
}

function number(value, digits) {
  return value === null ? '–' : value.toFixed(digits);
}

function duration(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
