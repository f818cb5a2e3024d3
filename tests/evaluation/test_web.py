"""The page of `sample.py --web`, as chromium shows it, and what its server answers to others."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import threading
import time
from urllib.parse import urlsplit

import pytest
from browser import Browser
from launch import command_of, environment

from evaluation import web

CALL = [{'role': 'assistant', 'content': '=6*7'}, {'role': 'tool', 'content': '42'}]
ASKED = {'role': 'user', 'content': '6x7?'}
ANSWERED = [ASKED, *CALL, {'role': 'assistant', 'content': 'It is 42.'}]


def start(model):
    """(the process of sample.py --web, the address of its page)."""
    options = ['--temperature=0', '--max_new_tokens=3000', '--device=cpu', '--dtype=float32']
    command = command_of('sample.py', f'--out_dir={model}', '--chat', '--web', '--tools=calculator', *options)
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    return process, next(found[0] for line in process.stderr if (found := re.search(r'http://\S+', line)))


@pytest.fixture(scope='module')
def address(talker):
    process, address = start(talker)
    yield address
    process.kill()
    process.wait()


# --- over HTTP --------------------------------------------------------------------------------------------------------


def open_request(address, method, path, headers=(), body=None):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.request(method, path, body, dict(headers))
    return connection.getresponse()


def post(address, body, **changes):
    """(status, parts) of the answer to a request as the page sends it, with other headers."""
    own = {'X-Key': address.partition('key=')[2], 'Content-Type': 'application/json'}
    headers = {name: value for name, value in (own | changes).items() if value is not None}
    reply = open_request(address, 'POST', '/answer', headers, body if isinstance(body, str) else json.dumps(body))
    lines = reply.read().decode().splitlines()
    return reply.status, [json.loads(line) for line in lines] if reply.status == 200 else lines


QUESTION = {'messages': [ASKED], 'temperature': 0}


def test_an_answer_comes_in_parts_and_the_call_before_it(address):
    status, parts = post(address, QUESTION)
    assert status == 200 and parts[0]['call']['messages'] == CALL
    assert ''.join(part['text'] for part in parts[1:]) == 'It is 42.' and len(parts) > 8


@pytest.mark.parametrize(
    'changes, status',
    [
        ({'X-Key': None}, 403),
        ({'X-Key': 'x' * 22}, 403),
        ({'Host': 'evil.example'}, 403),
        ({'Host': '127.0.0.1.evil.example:80'}, 403),
        ({'Host': 'localhost:8000'}, 200),  # at the end of a tunnel
        ({'Origin': 'http://evil.example'}, 403),
        ({'Origin': 'null'}, 403),
        ({'Origin': 'http://127.0.0.1:1'}, 403),  # a page of another server on this machine
        ({'Host': 'localhost:8000', 'Origin': 'http://localhost:8000'}, 200),
        ({'Content-Type': 'text/plain'}, 415),  # what a foreign page may send without asking
        ({'Content-Length': 'x'}, 411),
        ({'Content-Length': str(1 << 21)}, 413),
    ],
)
def test_who_may_ask(address, changes, status):
    assert post(address, QUESTION, **changes)[0] == status


def test_the_page_is_for_whoever_knows_its_address(address):
    own = f'/?{urlsplit(address).query}'
    page = open_request(address, 'GET', own)
    policy = page.headers['Content-Security-Policy']
    assert page.status == 200 and "default-src 'none'; script-src 'sha256-" in policy and 'unsafe' not in policy
    refused = [('/', {}, 403), ('/?key=x', {}, 403), (own, {'Host': 'evil.example'}, 403), (f'/x{own[1:]}', {}, 404)]
    for path, headers, status in refused:
        reply = open_request(address, 'GET', path, headers)
        assert reply.status == status and len(reply.read()) < 100


@pytest.mark.parametrize(
    'body, note',
    [
        ('{', 'Expecting property name'),
        ('[' * 100_000, 'RecursionError'),
        ({'messages': [ASKED]}, "KeyError('temperature')"),
        ({'messages': [{'role': 'user', 'content': 5}], 'temperature': 0}, 'content is a number'),
        ({'messages': [{'role': 'assistant', 'content': 'x'}], 'temperature': 0}, 'end with an answer'),
        ({'messages': [{'role': 'user', 'content': 'x' * 5000}], 'temperature': 0}, 'the model 4096 positions'),
        ({'messages': [{'role': 'user', 'content': '\ud800'}], 'temperature': 0}, 'Error('),
    ],
)
def test_what_cannot_be_answered_gets_a_note(address, body, note):
    status, (part,) = post(address, body)
    assert status == 200 and note in part['note']
    assert post(address, QUESTION)[1][-1] == {'text': ''}  # and the server goes on


def begin_song(address):
    """The reply to a request for a song, whose first part has come."""
    headers = {'X-Key': address.partition('key=')[2], 'Content-Type': 'application/json'}
    song = json.dumps({'messages': [{'role': 'user', 'content': 'Sing'}], 'temperature': 0})
    reply = open_request(address, 'POST', '/answer', headers, song)
    assert json.loads(reply.readline()) == {'text': 'l'}
    return reply


def test_one_answer_at_a_time_and_the_next_once_the_first_has_been_left(address):
    first, answers = begin_song(address), []
    second = threading.Thread(target=lambda: answers.append(post(address, QUESTION)))
    second.start()
    begin = time.monotonic()
    for _ in range(200):  # of 3000, and many more than the second answer has
        first.readline()
    assert answers == []
    first.close()
    of_200, begin = time.monotonic() - begin, time.monotonic()
    second.join()
    assert answers[0][0] == 200 and time.monotonic() - begin < 5 * of_200, 'the song went on'


def test_ctrl_c_ends_it_in_the_middle_of_an_answer(talker):
    process, address = start(talker)
    try:
        song = begin_song(address)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and process.stderr.read() == ''
        assert len(song.read().splitlines()) < 2500  # of 3000
    finally:
        process.kill()


def test_a_port_that_is_taken_is_one_line(address):
    others = {'say': print, 'generator_of': None, 'temperature': 0.8, 'positions': 64}
    with pytest.raises(ValueError, match=r'^web=\d+: .* in use; --web alone takes a free port$'):
        web.serve(None, None, None, 259, urlsplit(address).port, 'about', **others)


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def browser():
    if not shutil.which('chromium'):
        pytest.skip('no browser: bash tests/install_browser.sh, as root')
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(browser, address):
    browser.open(address)
    return browser


def until(browser, condition):
    end = time.monotonic() + 30
    while not browser.run(condition):
        assert time.monotonic() < end, (condition, browser.run('log.innerText'), browser.errors)
        time.sleep(0.02)


def ask(browser, text):
    browser.run(f'box.value = {json.dumps(text)}')
    for kind in ('keyDown', 'keyUp'):
        browser.ask('Input.dispatchKeyEvent', type=kind, key='Enter', code='Enter', windowsVirtualKeyCode=13, text='\r')


def click(browser, name):
    browser.run(f'[...document.querySelectorAll("button")].find(one => one.textContent == "{name}").click()')


def sent(browser):
    """The messages of each request."""
    events = [event['params']['request'] for event in browser.events if event['method'] == 'Network.requestWillBeSent']
    return [json.loads(request['postData'])['messages'] for request in events if request['method'] == 'POST']


def shown(browser):
    return browser.run('[...log.children].map(p => p.textContent)')


def test_the_page_answers_keeps_the_history_and_asks_for_nothing_else(page, address):
    ask(page, '6x7?')
    until(page, '!running')
    assert shown(page) == ['6x7?', 'calculator: 6*7 = 42', 'It is 42.']
    ask(page, 'Sing')
    until(page, 'log.lastChild.textContent.includes("la la")')
    click(page, 'Stop')
    until(page, '!running')
    assert sent(page) == [[ASKED], [*ANSWERED, {'role': 'user', 'content': 'Sing'}]]
    assert page.errors == []
    assert page.requests == [address] + [address.partition('?')[0] + 'answer'] * 2


def test_text_appears_as_it_is_written_until_stop_and_what_was_said_is_kept(page):
    ask(page, 'Sing')
    until(page, 'log.lastChild.textContent.length > 20')
    begun = page.run('log.lastChild.textContent.length')
    until(page, f'log.lastChild.textContent.length > {begun} + 20')
    assert page.run('send.textContent') == 'Stop'
    ask(page, 'more')  # Enter is no Stop
    assert page.run('running !== null && box.value') == 'more'
    click(page, 'Stop')
    until(page, '!running')
    _, song, note = shown(page)
    assert note == '(stopped)' and set(song) == {'l', 'a', ' '} and page.run('send.textContent') == 'Send'
    page.run('box.value = ""')
    ask(page, '6x7?')
    until(page, 'running && log.children.length > 4')
    assert sent(page)[-1] == [{'role': 'user', 'content': 'Sing'}, {'role': 'assistant', 'content': song}, ASKED]
    click(page, 'Stop')
    until(page, '!running')


def test_new_forgets_also_while_an_answer_is_written(page):
    ask(page, 'Sing')
    until(page, 'log.lastChild.textContent.includes("la la")')
    click(page, 'New')
    until(page, '!running')
    assert shown(page) == []
    ask(page, '6x7?')
    until(page, '!running')
    assert sent(page)[-1] == [ASKED] and shown(page)[-1] == 'It is 42.'


def test_a_refusal_is_shown_and_the_question_can_be_asked_again(page):
    long = 'x' * 5000
    ask(page, long)
    until(page, '!running && log.children.length == 2')
    assert '4096 positions' in shown(page)[1] and page.run('messages.length') == 0 and page.run('box.value') == long


def test_what_is_said_is_text_and_no_html(page):
    ask(page, '<img src=x onerror=alert(1)><b>b</b>')
    until(page, 'log.children.length > 1')
    assert page.run('log.querySelectorAll("img, b").length') == 0 and shown(page)[0].startswith('<img src=x')
    page.run('running?.abort()')
    until(page, '!running')


def test_a_foreign_name_for_this_machine_gets_no_page(browser, address):
    browser.open(address.replace('127.0.0.1', 'evil.localhost'))  # which chromium resolves to 127.0.0.1
    assert browser.run('document.body.innerText') == 'The address with its key stands in the terminal.'


@pytest.mark.parametrize('kind', ['application/json', 'text/plain'])
def test_a_foreign_page_gets_no_answer_even_with_the_key(browser, address, kind, tmp_path):
    (tmp_path / 'foreign.html').write_text('<!doctype html><title>foreign</title>')
    browser.open(tmp_path / 'foreign.html')
    headers = {'Content-Type': kind} | ({'X-Key': address.partition('key=')[2]} if kind != 'text/plain' else {})
    options = json.dumps({'method': 'POST', 'headers': headers, 'body': json.dumps(QUESTION)})
    target = address.partition('?')[0] + 'answer'
    browser.run(f'fetch("{target}", {options}).then(() => document.title = "read", () => document.title = "refused")')
    until(browser, 'document.title != "foreign"')
    assert browser.run('document.title') == 'refused'


def test_the_slider_is_the_temperature(page):
    assert page.run('document.getElementById("degree").textContent') == '0.00'
    page.run('heat.value = 1.25; heat.oninput()')
    assert page.run('document.getElementById("degree").textContent') == '1.25'
    ask(page, '6x7?')
    until(page, 'log.children.length > 1')
    page.run('running?.abort()')
    (request,) = [
        event['params']['request'] for event in page.events if event['method'] == 'Network.requestWillBeSent'
    ][1:]
    assert json.loads(request['postData'])['temperature'] == 1.25
    until(page, '!running')


@pytest.mark.parametrize('how', [{'width': 390}, {'width': 1200, 'scheme': 'dark'}], ids=str)
def test_a_page_fits_its_screen(browser, address, how, tmp_path):
    browser.open(address, **how)
    assert browser.run('document.documentElement.scrollWidth') == how['width']
    assert browser.run('document.querySelector("header").getBoundingClientRect().height') < 90
    assert browser.run('send.getBoundingClientRect().bottom') <= 900
    browser.picture(tmp_path / 'page.png')
