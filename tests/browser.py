"""
Debian's chromium without a screen, controlled by its DevTools protocol through a pipe: for the tests of pages.

    with Browser() as browser:
        browser.open('out/sweep_lr/report.html', width=390)
        browser.run('document.title')
        browser.errors, browser.requests        # what its console said, and the addresses that it asked for

    python tests/browser.py out/sweep_lr/report.html report.png 390 dark     # a picture; its width, light or dark
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Root can have no sandbox. Most of the other flags keep chromium from asking the network for updates.
FLAGS = '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking'
FLAGS += ' --disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe'


class Browser:
    """One page. Messages are JSON, each ended by a zero byte; an answer has the number of its question."""

    def __enter__(self):
        self.profile = tempfile.mkdtemp()
        theirs, ours = os.pipe(), os.pipe()
        there = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]  # none of them is 3 or 4
        self.process = subprocess.Popen(
            ['chromium', *FLAGS.split(), f'--user-data-dir={self.profile}', 'about:blank'],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(there[0], 3), os.dup2(there[1], 4)),
        )  # fmt: skip
        for end in (*there, theirs[0], ours[1]):
            os.close(end)
        self.sends, self.answers = os.fdopen(theirs[1], 'wb', 0), os.fdopen(ours[0], 'rb')
        self.number, self.session, self.events = 0, {}, []
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        self.session = {'sessionId': self.ask('Target.attachToTarget', targetId=target, flatten=True)['sessionId']}
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self.ask(f'{domain}.enable')
        return self

    def __exit__(self, *_):
        with contextlib.suppress(BrokenPipeError):
            self.sends.close()  # chromium ends when its pipe is closed
        self.process.terminate()
        self.process.wait()
        self.answers.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def ask(self, method, **parameters):
        """Send a command; returns its result. Events that come meanwhile go to self.events."""
        self.number += 1
        message = {'id': self.number, 'method': method, 'params': parameters, **self.session}
        self.sends.write(json.dumps(message).encode() + b'\0')
        return self.wait_for(lambda message: message.get('id') == self.number)['result']

    def wait_for(self, wanted):
        while True:
            text = bytearray()
            while (byte := self.answers.read(1)) != b'\0':
                assert byte, f'chromium has ended with {self.process.wait()}'
                text += byte
            message = json.loads(text)
            assert 'error' not in message, message['error']
            if 'method' in message:
                self.events.append(message)
            if wanted(message):
                return message

    def open(self, path, width=1200, scheme='light', media=''):
        """Show a file or an address on a screen of this width in CSS pixels, or on paper (media='print')."""
        self.events.clear()
        screen = {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': width < 600}
        self.ask('Emulation.setDeviceMetricsOverride', **screen)
        feature = {'name': 'prefers-color-scheme', 'value': scheme}
        self.ask('Emulation.setEmulatedMedia', media=media, features=[feature])
        loaded = [event for event in self.events if event['method'] == 'Page.loadEventFired']
        self.ask('Page.navigate', url=path if '://' in str(path) else Path(path).absolute().as_uri())
        if not loaded:
            self.wait_for(lambda message: message.get('method') == 'Page.loadEventFired')

    def run(self, script):
        """The value of an expression of JavaScript."""
        answer = self.ask('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in answer, answer
        return answer['result'].get('value')

    @property
    def errors(self):
        kinds = ('Runtime.exceptionThrown', 'Runtime.consoleAPICalled', 'Log.entryAdded')
        return [event['params'] for event in self.events if event['method'] in kinds]

    @property
    def requests(self):
        sent = [event['params'] for event in self.events if event['method'] == 'Network.requestWillBeSent']
        return [one['request']['url'] for one in sent]

    def picture(self, path):
        """A PNG of what the screen shows."""
        Path(path).write_bytes(base64.b64decode(self.ask('Page.captureScreenshot')['data']))


if __name__ == '__main__':
    page, picture, width, scheme = sys.argv[1:]
    with Browser() as browser:
        browser.open(page, int(width), scheme=scheme)
        browser.picture(picture)
