// The server's load over the last minutes, one strip for each quantity.

const SECONDS = 300;
const HEIGHT = 40;
const SVG = 'http://www.w3.org/2000/svg';
const STRIPS = [
  { name: 'running', title: 'requests running', shown: (value) => String(value), least: 1 },
  { name: 'waiting', title: 'requests waiting', shown: (value) => String(value), least: 1 },
  {
    name: 'used_pages',
    title: 'cache pages used',
    shown: (value) => `${Math.round(100 * value)} %`,
    least: 1,
  },
];

export class Plots {
  constructor(place) {
    this.samples = [];
    this.strips = STRIPS.map((strip) => new Strip(strip, place));
  }

  // Adds the current load of the server; null if the server did not answer.
  add(load) {
    const now = Date.now() / 1000;
    this.samples.push({ at: now, load });
    this.samples = this.samples.filter(({ at }) => at > now - SECONDS);
    for (const strip of this.strips) strip.draw(this.samples, now);
  }
}

class Strip {
  constructor({ name, title, shown, least }, place) {
    Object.assign(this, { name, title, shown, least });
    this.figure = document.createElement('figure');
    this.figure.className = 'plot';
    const caption = document.createElement('figcaption');
    this.value = document.createElement('output');
    caption.append(title, this.value);
    this.svg = drawn('svg', { viewBox: `0 0 ${SECONDS} ${HEIGHT}`, preserveAspectRatio: 'none' });
    this.svg.setAttribute('role', 'img');
    this.area = drawn('path', { class: 'area' });
    this.edge = drawn('path', { class: 'edge' });
    this.svg.append(this.area, this.edge);
    this.figure.append(caption, this.svg);
    place.append(this.figure);
  }

  draw(samples, now) {
    const known = samples.filter(({ load }) => load !== null);
    const top = Math.max(this.least, ...known.map(({ load }) => load[this.name]));
    const x = ({ at }) => SECONDS - (now - at);
    const y = ({ load }) => HEIGHT - 1 - (load[this.name] / top) * (HEIGHT - 4);
    let edge = '';
    let area = '';
    for (const run of runs(samples)) {
      // Each value holds until the next one: steps, not slopes.
      const steps = run.map((sample) => `V${y(sample).toFixed(1)}H${x(sample).toFixed(1)}`).join('');
      const begin = x(run[0]).toFixed(1);
      edge += `M${begin} ${y(run[0]).toFixed(1)}${steps}`;
      area += `M${begin} ${HEIGHT}${steps}V${HEIGHT}Z`;
    }
    this.edge.setAttribute('d', edge);
    this.area.setAttribute('d', area);
    const last = samples.at(-1);
    this.value.textContent = last?.load ? this.shown(last.load[this.name]) : '–';
    const most = known.length ? this.shown(top) : 'unknown';
    this.svg.setAttribute('aria-label', `${this.title}: now ${this.value.textContent}, top ${most}`);
  }
}

// Returns the runs of consecutive samples with a load. A failed request ends a run.
function runs(samples) {
  const found = [[]];
  for (const sample of samples) {
    if (sample.load !== null) found.at(-1).push(sample);
    else if (found.at(-1).length) found.push([]);
  }
  return found.filter((run) => run.length);
}

function drawn(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
