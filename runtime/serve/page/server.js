// The server's routes, by paths relative to the page: a proxy may put both under a prefix.

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// A route's response. ServerError with the server's own sentence where it refuses.
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

// A route's JSON.
export async function get(path, key) {
  return (await call(path, key)).json();
}

// The chunks of a stream as they come. ServerError where it is refused, fails or breaks off.
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
