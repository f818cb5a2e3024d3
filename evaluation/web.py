"""
A page in the browser to talk to a model: http://127.0.0.1:PORT/, for whoever knows the key in its address.

    serve(model, language, system, vocab_size, port, about, say, ...)  # until Ctrl-C

Python's own http.server is enough, since one person asks one model: answers are written one at a time. The page keeps
the conversation and sends all of it with each message, so the server remembers nothing.

Who may ask: only this machine (127.0.0.1), and of its users only those who have the key. A foreign page in the same
browser may not, even when its name has been made to resolve to 127.0.0.1: the Host has to be this machine's name, the
Origin the page's own, and JSON as the content type makes a browser ask before it sends anything from elsewhere. The
page loads nothing, neither from here nor from elsewhere, and shows what the model says as text, never as HTML.
"""

import base64
import contextlib
import hashlib
import hmac
import html
import itertools
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from evaluation import chat
from evaluation.prompts import conversation_to_answer, refuse_what_does_not_fit
from evaluation.sampling import Memory
from system.errors import one_line

MOST_BYTES = 1 << 20  # of a conversation
HOSTS = ('127.0.0.1', 'localhost')  # with any port: behind `ssh -L 8000:127.0.0.1:8080` it is another one

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 46rem; height: 100dvh; margin: 0 auto; padding: 1rem; box-sizing: border-box;
  display: flex; flex-direction: column; gap: .5rem }
header, footer, label { display: flex; flex-wrap: wrap; gap: .25rem .75rem; align-items: center; font-size: .9rem }
footer { flex-wrap: nowrap }
#about { flex: 1 1 14rem; overflow-wrap: anywhere; opacity: .7 }
#log { flex: 1; overflow-y: auto }
#log p { margin: .5rem 0; padding: .5rem .8rem; border-radius: .5rem; white-space: pre-wrap; overflow-wrap: anywhere }
#log .user { width: fit-content; max-width: 75%; margin-left: auto; background: #8883 }
#log .note { padding-block: 0; font-size: .9rem; opacity: .7 }
#box { flex: 1; min-width: 0; padding: .5rem; resize: none }
button, #box { font: inherit }
"""

SCRIPT = """
const key = new URLSearchParams(location.search).get('key')
const [log, box, send, heat] = ['log', 'box', 'send', 'heat'].map(id => document.getElementById(id))
let messages = [], running = null

function line(kind, words) {
  const p = document.createElement('p')
  p.className = kind
  log.append(p)
  add(p, words)
  return p
}

function add(p, words) {  // at the end of a paragraph; who has scrolled up to read stays there
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80
  p.textContent += words
  if (follows) log.scrollTop = log.scrollHeight
}

async function ask() {
  const said = box.value.trim(), mine = messages, before = mine.length
  if (!said) return
  box.value = ''
  mine.push({ role: 'user', content: said })
  const question = line('user', said)
  let p = null, answer = ''
  running = new AbortController()
  send.textContent = 'Stop'
  try {
    const reply = await fetch('/answer', {
      method: 'POST', signal: running.signal, headers: { 'Content-Type': 'application/json', 'X-Key': key },
      body: JSON.stringify({ messages: mine, temperature: Number(heat.value) }) })
    if (!reply.ok) throw new Error(await reply.text())
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader()
    let rest = ''
    for (let part; !(part = await reader.read()).done;) {
      const lines = (rest + part.value).split('\\n')
      rest = lines.pop()
      for (const { text, call, note } of lines.map(one => JSON.parse(one))) {
        if (call) mine.push(...call.messages), line('note', call.line)
        if (note) line('note', note)
        if (text) add(p ??= line('assistant', ''), text)
        answer += text ?? ''
      }
    }
  } catch (error) {
    if (mine == messages) line('note', error.name == 'AbortError' ? '(stopped)' : error.message)  // else it is New
  }
  if (answer) {
    mine.push({ role: 'assistant', content: answer })
  } else if (mine == messages) {  // nothing was said: the question is as if never asked
    mine.length = before
    box.value ||= said
    question.classList.add('note')
  }
  running = null
  send.textContent = 'Send'
}

send.onclick = () => { running ? running.abort() : ask(); box.focus() }
box.onkeydown = event => {
  if (event.key != 'Enter' || event.shiftKey || event.isComposing) return
  event.preventDefault()
  if (!running) ask()
}
heat.oninput = () => { document.getElementById('degree').textContent = Number(heat.value).toFixed(2) }
heat.oninput()
box.focus()
document.getElementById('new').onclick = () => {
  messages = []
  running?.abort()
  log.replaceChildren()
  box.focus()
}
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>chat</title>
<style>{style}</style>
<body>
<header>
<span id="about">{about}</span>
<label>temperature <input id="heat" type="range" min="0" max="2" step="0.05" value="{temperature}"></label>
<output id="degree"></output>
<button id="new">New</button>
</header>
<div id="log" aria-live="polite"></div>
<footer>
<textarea id="box" rows="2" aria-label="message" placeholder="a message; Enter sends it"></textarea>
<button id="send">Send</button>
</footer>
<script>{script}</script>
</body>
</html>
"""


def digest(text):
    """What a Content-Security-Policy says of the only script, and of the only style, that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = f"default-src 'none'; script-src {digest(SCRIPT)}; style-src {digest(STYLE)}; connect-src 'self'; "
POLICY += "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
HEADERS = {'Content-Security-Policy': POLICY, 'X-Content-Type-Options': 'nosniff', 'Referrer-Policy': 'no-referrer'}
HEADERS |= {'Cache-Control': 'no-store', 'Connection': 'close'}  # what is not read of a request is no other one
REFUSED = 'The address with its key stands in the terminal.'


def serve(model, language, system, vocab_size, port, about, say, generator_of, temperature, positions, **options):
    """
    Answer until Ctrl-C.

    system: the system message, or None. port: True = a free one. about: what the page says of the model. say: function
    that prints a line. generator_of: function from the number of a question to its torch.Generator. temperature: where
    the page's slider begins. positions, options: of chat.answer().
    """
    key, writing, ending = secrets.token_urlsafe(16), threading.Lock(), threading.Event()
    questions, memory = itertools.count(), Memory()
    page = PAGE.format(style=STYLE, script=SCRIPT, about=html.escape(about), temperature=temperature)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'
        timeout = 60  # of a socket: a client that sends nothing does not hold a thread for ever

        def log_message(self, *_):
            pass

        def handle(self):
            with contextlib.suppress(OSError):  # Stop, or the page was closed
                super().handle()

        def reply(self, code, body='', kind='text/plain; charset=utf-8'):
            self.begin(code, {'Content-Type': kind, 'Content-Length': str(len(body.encode()))})
            self.wfile.write(body.encode())

        def begin(self, code, headers):
            self.send_response(code)
            for name, value in (HEADERS | headers).items():
                self.send_header(name, value)
            self.end_headers()

        def may_ask(self, given):
            host, origin = self.headers.get('Host', ''), self.headers.get('Origin')
            is_ours = host.partition(':')[0] in HOSTS and origin in (None, f'http://{host}')
            return is_ours and hmac.compare_digest(given.encode(), key.encode())

        def do_GET(self):
            address = urlsplit(self.path)
            if not self.may_ask(parse_qs(address.query).get('key', [''])[0]):
                self.reply(403, REFUSED)
            elif address.path != '/':
                self.reply(404)
            else:
                self.reply(200, page, 'text/html; charset=utf-8')

        def do_POST(self):
            size = self.headers.get('Content-Length', '')
            if not self.may_ask(self.headers.get('X-Key', '')):
                self.reply(403, REFUSED)
            elif self.path != '/answer':
                self.reply(404)
            elif self.headers.get_content_type() != 'application/json':
                self.reply(415)
            elif not (size.isascii() and size.isdigit()):
                self.reply(411)
            elif len(size) > 9 or int(size) > MOST_BYTES:
                self.reply(413, 'The conversation has more than 1 MB: New begins another.')
            else:
                asked = self.rfile.read(int(size))
                with writing, contextlib.closing(parts_of(asked)) as parts:
                    self.begin(200, {'Content-Type': 'application/x-ndjson', 'Transfer-Encoding': 'chunked'})
                    for part in itertools.takewhile(lambda _: not ending.is_set(), parts):
                        line = json.dumps(part).encode() + b'\n'
                        self.wfile.write(b'%x\r\n%s\r\n' % (len(line), line))
                    self.wfile.write(b'0\r\n\r\n')

    def parts_of(asked):
        """The parts of the answer to a request, the last of them a note if something is wrong with it."""
        try:
            asked = json.loads(asked)
            messages = [{'role': message['role'], 'content': message['content']} for message in asked['messages']]
            yield from answer(messages, min(2.0, max(0.0, float(asked['temperature']))))
        except Exception as error:  # a template or a tokenizer may raise anything; the next question may fare better
            yield {'note': one_line(error) if isinstance(error, ValueError) else repr(error)}

    def answer(messages, temperature):
        conversation = conversation_to_answer({'messages': messages}, system, 'the message')
        prompt = language.prompt_of_chat(conversation)
        refuse_what_does_not_fit(prompt, 'the conversation', language, positions, vocab_size)
        now = {'generators': [generator_of(next(questions))], 'temperature': temperature, 'memory': memory}
        for kind, said in chat.answer(model, language, conversation, prompt, positions=positions, **now, **options):
            yield {kind: said._asdict() | {'line': said.line} if kind == 'call' else said}

    try:
        server = ThreadingHTTPServer(('127.0.0.1', 0 if port is True else port), Handler)
    except OSError as error:
        raise ValueError(f'web={port}: {error.strerror}; --web alone takes a free port') from error
    server.daemon_threads = True
    say(f'http://127.0.0.1:{server.server_address[1]}/?key={key}    (Ctrl-C ends it)')
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
    ending.set()
    writing.acquire()  # for good: an answer ends with its next token, since Python cannot end while a thread computes
