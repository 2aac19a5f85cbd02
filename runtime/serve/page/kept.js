// Values that are stored until the tab is closed. Each path of an origin has its own values, since
// it may be another server.

const prefix = `specbuild ${location.pathname} `;

export function keep(name, value) {
  try {
    sessionStorage.setItem(prefix + name, JSON.stringify(value));
  } catch {
    // The storage is full or forbidden, so the value is lost when the page is reloaded.
  }
}

export function kept(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(prefix + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
