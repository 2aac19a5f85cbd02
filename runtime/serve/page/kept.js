// What this tab keeps until it is closed. Servers under one origin keep theirs apart.

const prefix = `specbuild ${location.pathname} `;

export function keep(name, value) {
  try {
    sessionStorage.setItem(prefix + name, JSON.stringify(value));
  } catch {
    // Full or forbidden: the page goes on, and forgets when it is reloaded.
  }
}

export function kept(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(prefix + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
