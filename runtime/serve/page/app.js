// The page: a conversation with the server's model, and statistics of the server.

import { Figures } from './figures.js';
import { keep, kept } from './kept.js';
import { Plots } from './plots.js';
import { get, ServerError, stream } from './server.js';
import { newTurn, textOf, TurnView } from './turn.js';

const POLL_MS = 1000;
const SAVE_MS = 500;
const find = (id) => document.getElementById(id);
const settings = find('settings');

let about = { chat: true, draft: true, key: false };
let model = null;
let turns = kept('conversation', []);
let running = null; // the AbortController of the answer that is being written

// -- The conversation

function showAll() {
  find('log').replaceChildren(find('welcome'), ...turns.map((turn) => view(turn).element));
  find('welcome').hidden = turns.length > 0;
  follow(true);
}

function view(turn) {
  return new TurnView(turn, { fences: about.chat && turn.role === 'assistant', retry });
}

function addTurn(turn) {
  turns.push(turn);
  find('welcome').hidden = true;
  const shown = view(turn);
  find('log').append(shown.element);
  return shown;
}

// Scrolls to the end of the conversation, unless the user has scrolled up.
function follow(always = false) {
  const log = find('log');
  const left = log.scrollHeight - log.clientHeight - log.scrollTop;
  if (always || left < 80) log.scrollTop = log.scrollHeight;
}

function save() {
  keep('conversation', turns);
}

// -- Requests

function requestBody() {
  const value = (id) => find(id).value.trim();
  const body = {
    model,
    stream: true,
    return_draft_tokens: true,
    temperature: Number(value('temperature')),
    top_p: Number(value('top_p')),
    // null generates up to the end of the context.
    max_tokens: value('max_tokens') === '' ? null : Number(value('max_tokens')),
  };
  if (value('seed') !== '') body.seed = Number(value('seed'));
  if (!about.chat) {
    const prompt = turns.map((turn) => textOf(turn.content)).join('');
    return ['v1/completions', { ...body, prompt }];
  }
  const messages = turns
    .filter((turn) => turn.content.length)
    .map(({ role, content }) => ({ role, content: textOf(content) }));
  if (value('system')) messages.unshift({ role: 'system', content: value('system') });
  return ['v1/chat/completions', { ...body, messages }];
}

async function send() {
  const text = find('prompt').value;
  const continues = !about.chat && turns.length > 0;
  if (running || (!text.trim() && !continues) || !settings.reportValidity()) return;
  if (text) addTurn(newTurn('user', text));
  find('prompt').value = '';
  await request();
}

async function request() {
  const [path, body] = requestBody();
  const shown = addTurn(newTurn('assistant'));
  shown.open();
  follow(true);
  await answer(shown, path, body);
}

// Replaces the last answer by another one.
async function retry() {
  if (running || turns.at(-1)?.role !== 'assistant' || !settings.reportValidity()) return;
  turns.pop();
  find('log').lastElementChild.remove();
  await request();
}

async function answer(shown, path, body) {
  running = new AbortController();
  busy(true);
  const figures = new Figures({ drafts: about.draft });
  const saving = setInterval(save, SAVE_MS);
  try {
    for await (const { choices } of stream(path, body, key(), running.signal)) {
      if (choices.length) take(shown, choices[0], figures);
    }
    shown.turn.note = figures.note;
  } catch (error) {
    shown.turn.note = error.name === 'AbortError' ? `stopped · ${figures.note}` : figures.note;
    if (error.name !== 'AbortError') failed(error, shown.turn);
  } finally {
    clearInterval(saving);
    running = null;
    shown.finish();
    busy(false);
    save();
    follow();
  }
}

function take(shown, choice, figures) {
  const { reasoning, content } = choice.delta ?? { content: choice.text };
  if (reasoning) shown.add('reasoning', reasoning, choice.from_draft);
  if (content) shown.add('content', content, choice.from_draft);
  figures.take(choice);
  for (const [name, value] of Object.entries(figures.shown)) find(name).textContent = value;
  follow();
}

function failed(error, turn) {
  if (!(error instanceof ServerError)) throw error;
  turn.error = error.message;
  if (error.status === 401) askKey('The server rejects this key');
}

function busy(now) {
  find('log').setAttribute('aria-busy', String(now));
  find('stop').hidden = !now;
  find('send').hidden = now;
  if (!now) find('prompt').focus();
}

// -- The server

function key() {
  return kept('key', '');
}

function askKey(title) {
  find('key-form').hidden = false;
  find('key-form').querySelector('label').textContent = title;
  find('key').focus();
}

async function connect() {
  try {
    about = await get('page/about.json');
    describe();
    model = (await get('v1/models', key())).data[0].id;
    find('model').textContent = model;
    find('key-form').hidden = true;
    state('ready', 'ready');
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    if (error.status === 401) askKey(key() ? 'The server rejects this key' : 'This server requires an API key');
    state(error.status === 401 ? 'unknown' : 'failed', error.message);
  }
  find('send').disabled = model === null;
}

function describe() {
  document.body.classList.toggle('plain', !about.chat);
  document.body.classList.toggle('draftless', !about.draft);
  if (about.chat) return;
  find('welcome-title').textContent = 'Start a text';
  find('welcome-text').textContent =
    'This engine has no chat template: the model continues your text.';
  find('prompt').placeholder = 'def area(radius):';
}

function state(name, text) {
  find('state').dataset.state = name;
  find('state').textContent = text;
}

async function poll(plots) {
  if (!document.hidden) {
    const load = await get('load').catch(() => null);
    plots.add(load);
    if (load === null) state('failed', 'the server cannot be reached');
    else if (find('state').dataset.state === 'failed') await connect();
  }
  setTimeout(poll, POLL_MS, plots);
}

// -- Event handlers

find('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  send();
});
find('prompt').addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (model !== null) send();
});
find('stop').addEventListener('click', () => running?.abort());
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape') return;
  running?.abort();
  panel(false);
});
find('new').addEventListener('click', () => {
  running?.abort();
  turns = [];
  save();
  showAll();
  find('prompt').focus();
});
find('key-form').addEventListener('submit', async (event) => {
  event.preventDefault();
  keep('key', find('key').value.trim());
  find('key').value = '';
  await connect();
  if (model !== null) find('prompt').focus();
});

function panel(shown) {
  find('panel').classList.toggle('shown', shown);
  find('panel-toggle').setAttribute('aria-expanded', String(shown));
}
find('panel-toggle').addEventListener('click', () => panel(!find('panel').classList.contains('shown')));

function tint() {
  document.body.classList.toggle('untinted', !find('tint').checked);
}
const fields = [...settings.querySelectorAll('input, textarea')];
const value = (field) => (field.type === 'checkbox' ? 'checked' : 'value');
const saved = kept('settings', {});
for (const field of fields) field[value(field)] = saved[field.id] ?? field[value(field)];
settings.addEventListener('input', () => {
  keep('settings', Object.fromEntries(fields.map((field) => [field.id, field[value(field)]])));
  tint();
});
settings.addEventListener('submit', (event) => event.preventDefault());
window.addEventListener('pagehide', () => {
  if (running) turns.at(-1).note = 'interrupted';
  save();
});

tint();
await connect();
showAll();
poll(new Plots(find('plots')));
