"""
Storage that all jobs of a pool can reach: a folder, or a bucket through fsspec. It needs a single guarantee: an object
is created only if no object has that name yet, so that exactly one of several writers wins.

    store = open_store('/project/pool')      # or 's3://bucket/pool', 'gs://...', with that file system's package
    store.probe()                            # raises ValueError for a store without that guarantee
    store.create('commits/000007', data)     # True: the object is ours; False: another job's object has the name

An object appears whole or not at all, and never changes. The only exception is replace(), for signs of life.

In a folder, a file is written under a temporary name, synced, and then link()ed to its final name, which fails if that
name is taken. The failure may be reported falsely: NFS may report it although its server has made the link, and a
bucket may answer 412 when a request that had succeeded is repeated. So after such a failure the object is read, and if
it has the content that was to be written, it is ours. This is why callers put their own name into what they create.
"""

import concurrent.futures
import contextlib
import errno
import os
import stat
import time
import uuid

# Errors for which repeating does not help: full disk or quota, no permission, not a folder, too large, name too long.
FINAL = {getattr(errno, name) for name in 'ENOSPC EDQUOT EACCES EPERM EROFS ENOTDIR EFBIG ENAMETOOLONG'.split()}
PAUSES_S = (0.1, 0.5, 2.0, 8.0)  # between attempts: the server may be restarting, or a file handle stale
LARGEST_SKEW_S = 3600.0  # between this machine's clock and the store's


def open_store(address):
    """A Folder or Bucket. Raises ValueError if the package for such an address is missing, or if the folder is inside
    of a run's out_dir."""
    if '://' not in address:
        path = os.path.abspath(address)
        while path != os.path.dirname(path):
            if os.path.isdir(os.path.join(path, 'checkpoints')) and os.path.exists(os.path.join(path, 'train.log')):
                raise ValueError(f'exchange={address} is inside of {path}, the out_dir of a run: use another')
            path = os.path.dirname(path)
        return Folder(address)
    try:
        import fsspec

        return Bucket(address, *fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True))
    except ImportError as error:
        package = {'s3': 's3fs', 'gs': 'gcsfs', 'az': 'adlfs'}.get(address.partition('://')[0], 'its package')
        raise ValueError(f'exchange={address} needs a package ({error}): pip install {package}') from None
    except ValueError as error:
        raise ValueError(f'exchange={address}: {error}; expected a folder, or s3://bucket/name') from None


def digest_of(data):
    """xxh3 with 128 bits, as text. It detects truncated or damaged data and is 30 times as fast as sha256."""
    import xxhash  # here, because only runs in a pool need the package

    return xxhash.xxh3_128_hexdigest(data)


class Store:
    """What a Folder and a Bucket have in common. Names are relative, with at most one folder.

    Methods raise FileNotFoundError, or a one-line OSError after repeated attempts have failed.
    """

    def create(self, name, data):
        """Create an object. Returns True if `name` now has this content, False if another object has the name."""
        try:
            self._retry('write', name, lambda: self._create(name, data))
            return True
        except FileExistsError:
            return self.read(name, most=len(data) + 1) == data

    def replace(self, name, data):
        """Write an object, replacing an older one; a reader may see it half written."""
        self._retry('write', name, lambda: self._replace(name, data))

    def read(self, name, room=None, most=None):
        """The content of an object, or of a larger one than `most` bytes its beginning. room: a buffer; if it has the
        size of a Folder's file, the file is read into it and `room` is returned, which saves the allocation."""
        return self._retry('read', name, lambda: self._read(name, room, most))

    def list(self, folder):
        """Names in a folder, sorted; [] if there is no such folder. Never from a cache."""
        names = []
        with contextlib.suppress(FileNotFoundError):
            names = self._retry('list', folder, lambda: self._list(folder))
        return sorted(name for name in names if not name.endswith('.tmp'))

    def remove(self, folder, names):
        """Delete objects of a folder; objects that another job has deleted already are no error."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._retry('delete', f'{folder}/{name}', lambda name=name: self._remove(f'{folder}/{name}'))

    def probe(self):
        """Raise ValueError if the store does not keep create()'s guarantee, or if its clock is too far from ours."""
        folder, racers = f'probe_{uuid.uuid4().hex[:12]}', 4
        contents = [f'{number} {folder}'.encode() for number in range(racers)]
        try:
            with concurrent.futures.ThreadPoolExecutor(racers) as threads:
                won = list(threads.map(lambda content: self.create(f'{folder}/race', content), contents))
            survivor = self.read(f'{folder}/race')
            again = self.create(f'{folder}/race', b'another')
            if won != [content == survivor for content in contents] or again or self.read(f'{folder}/race') != survivor:
                raise ValueError(
                    f'exchange={self.address}: of {racers} writers that were to create the same object {sum(won)} were '
                    'told that it is theirs: this store ignores conditions on writes; use a folder or another store'
                )
            skew = time.time() - self._retry('read', 'its clock', lambda: self._time_of(f'{folder}/race'))
            if abs(skew) > LARGEST_SKEW_S:
                where = 'ahead of' if skew > 0 else 'behind'
                raise ValueError(
                    f'the clock of this machine is {abs(skew) / 3600:.1f} h {where} that of exchange={self.address}: '
                    'set it, with `timedatectl set-ntp true` or the like'
                )
        finally:
            with contextlib.suppress(OSError):
                self.remove(folder, self.list(folder))
                self.remove_folder(folder)

    def _retry(self, what, name, action):
        for pause in (*PAUSES_S, None):
            try:
                return action()
            except Exception as error:  # packages raise errors of their own: botocore's are not OSErrors
                is_an_answer = isinstance(error, FileNotFoundError) and what != 'write'
                if is_an_answer or isinstance(error, FileExistsError):
                    raise
                is_final = getattr(error, 'errno', None) in FINAL or isinstance(error, PermissionError)
                if pause is None or is_final:
                    reason = getattr(error, 'strerror', None) or ' '.join(str(error).split())[:200]
                    raise OSError(f'cannot {what} {self.address}/{name}: {reason}') from error
                time.sleep(pause)


class Folder(Store):
    """A folder on a disk or a network file system."""

    def __init__(self, path):
        self.address = path

    def _path(self, name):
        return os.path.join(self.address, name)

    def _create(self, name, data):
        path = self._path(name)
        unfinished = f'{path}.{uuid.uuid4().hex[:12]}.tmp'
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(unfinished, 'wb') as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(unfinished, path)
        finally:
            with contextlib.suppress(OSError):
                os.remove(unfinished)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _replace(self, name, data):  # in place: after a rename, NFS clients would see the old file for a while
        os.makedirs(os.path.dirname(self._path(name)), exist_ok=True)
        with open(self._path(name), 'wb') as file:
            file.write(data)

    def _read(self, name, room=None, most=None):
        # A pipe or device that somebody has put there would be read for ever, or waited for when it is opened.
        with open(self._path(name), 'rb', opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise FileNotFoundError(errno.ENOENT, 'no regular file', self._path(name))
            if room is None or about.st_size != len(room):
                return file.read(most)
            file.readinto(room)
            return room

    def _list(self, folder):
        self._refuse_link(folder)
        return os.listdir(self._path(folder))

    def _refuse_link(self, folder):
        """A link in place of a folder would have other files listed, and then deleted, than those of the pool."""
        if folder and os.path.islink(self._path(folder)):
            raise FileNotFoundError(errno.ENOENT, 'a link', self._path(folder))

    def _remove(self, name):
        os.remove(self._path(name))

    def remove_folder(self, folder):
        """Delete a folder, including temporary files of killed writers."""
        with contextlib.suppress(OSError):
            self._refuse_link(folder)
            for name in os.listdir(self._path(folder)):
                os.remove(self._path(f'{folder}/{name}'))
            os.rmdir(self._path(folder))

    def _time_of(self, name):
        return os.stat(self._path(name)).st_mtime


class Bucket(Store):
    """An object store, reached through fsspec."""

    def __init__(self, address, files, path):
        self.address, self.files, self.path = address.rstrip('/'), files, path.rstrip('/')

    def _create(self, name, data):
        self.files.pipe_file(f'{self.path}/{name}', bytes(data), mode='create')

    def _replace(self, name, data):
        self.files.pipe_file(f'{self.path}/{name}', data)

    def _read(self, name, room=None, most=None):
        path = f'{self.path}/{name}'
        end = most if most is not None and self.files.size(path) > most else None
        return self.files.cat_file(path, end=end)

    def _list(self, folder):
        self.files.invalidate_cache()
        return [path.rpartition('/')[2] for path in self.files.ls(f'{self.path}/{folder}', detail=False)]

    def _remove(self, name):
        self.files.rm_file(f'{self.path}/{name}')

    def remove_folder(self, folder):
        """A bucket has no folders."""

    def _time_of(self, name):
        return self.files.modified(f'{self.path}/{name}').timestamp()
