// Calls of the server's routes. Paths are relative to the page, since a proxy may add a prefix.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Returns a route's response. Throws ServerError with the server's message for an error status.
async function call(path, key, options = {}) {
  const headers = { 'Content-Type': 'application/json' };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new ServerError('the server cannot be reached', 0);
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const message = answer.error?.message ?? `the server answers ${response.status}`;
  throw new ServerError(message, response.status);
}

// Returns the JSON of a route.
export async function get(path, key) {
  return (await call(path, key)).json();
}

// Yields the chunks of a stream as they arrive. Throws ServerError if it is refused, fails or ends
// early.
export async function* stream(path, body, key, signal) {
  const response = await call(path, key, { method: 'POST', body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ''; ;) {
    const { value, done } = await reader.read().catch((error) => {
      if (error.name === 'AbortError') throw error;
      throw new ServerError('the connection broke off', 0);
    });
    if (done) throw new ServerError('the connection ended before the answer', 0);
    const lines = (held + value).split('\n');
    held = lines.pop();
    for (const line of lines) {
      if (line === 'data: [DONE]') return;
      if (!line.startsWith('data: ')) continue;
      const chunk = JSON.parse(line.slice('data: '.length));
      if (chunk.error) throw new ServerError(chunk.error.message, response.status);
      yield chunk;
    }
  }
}
