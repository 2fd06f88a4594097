"""This module turns what obstore raises into our errors.

`failure_of` decides by the class of an exception, the status and the code in its text. A failure that another attempt
may not meet is a `Retryable`. Every other failure is a `StorageError`, whose text names the call and the store. The
texts hold no secret of the options. The module makes no requests.
"""

from __future__ import annotations

import errno
import re

from lakeckpt.errors import ObjectMissing, StorageError
from lakeckpt.lake.storage.retry import Retryable
from lakeckpt.lake.storage.store_options import StoreOptions

__all__ = ["BehindTheEnd", "Refused", "failure_of", "shown"]

_STATUS = re.compile(r"status code: (\d+)")
_CODE, _MESSAGE = re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>")
_PASSING = frozenset({408, 409, 429})
_PASSING_CODES = frozenset({"ExpiredToken", "RequestTimeout", "RequestTimeTooSkewed"})
_CONDITION = frozenset({"PreconditionError", "AlreadyExistsError", "NotModifiedError"})
_LASTING = frozenset({"PermissionDeniedError", "UnauthenticatedError", "InvalidPathError", "NotSupportedError"})


class Refused(StorageError):
    """The object does not meet the condition of the request."""


class BehindTheEnd(StorageError):
    """The range begins where the object ends, or behind."""


def failure_of(error: Exception, what: str, options: StoreOptions) -> Exception:
    """Return what an exception of obstore means. ``what`` begins the text of a lasting failure."""
    name, whole, text = type(error).__name__, str(error), shown(error, options)
    status = int(found[1]) if (found := _STATUS.search(whole)) is not None else 0
    code = found[1] if (found := _CODE.search(whole)) is not None else ""
    if "empty path segment" in text:
        advice = "Move that object, or open a table through filesystem=s3fs.S3FileSystem(…)"
        return _lasting(StorageError, f"{what}: {text}. {advice}")
    if code == "NoSuchBucket":
        return _lasting(ObjectMissing, f"{what}: its bucket is not there", errno.ENODEV)
    if isinstance(error, FileNotFoundError):
        return _lasting(ObjectMissing, f"{what}: there is no such object", errno.ENOENT)
    if name in _CONDITION:
        return _lasting(Refused, f"{what}: {text}")
    if status == 416:
        return _lasting(BehindTheEnd, f"{what}: {text}")
    if status == 501 and what.startswith("cannot delete"):
        text = f"{text}. A store without batches of deletes needs the storage option disable_bulk_delete=True"
    is_passing = status in _PASSING or code in _PASSING_CODES
    if not is_passing and (name in _LASTING or status in (401, 403)):
        return _lasting(StorageError, f"{what}: {text}", errno.EACCES)
    if status == 501 or (0 < status < 500 and not is_passing):
        return _lasting(StorageError, f"{what}: {text}")
    if "kind: Timeout" in whole or "TimedOut" in whole:
        return Retryable("no whole answer in time", errno=errno.ETIMEDOUT)
    if not status and ("HTTP error" in whole or "error decoding" in whole):
        return Retryable(f"the connection broke ({text})", errno=errno.ECONNRESET)
    return Retryable(text, errno=errno.EREMOTEIO)


def shown(error: BaseException, options: StoreOptions) -> str:
    """Return an error's text in one line, without secrets and without the details that obstore adds for its authors."""
    text = str(error).partition("\n\nDebug source")[0]
    code, message, status = _CODE.search(text), _MESSAGE.search(text), _STATUS.search(text)
    if status is not None:
        named = f" {code[1]}" if code is not None else ""
        text = f"the store answered {status[1]}{named}" + (f": {message[1]}" if message is not None else "")
    if "169.254.169.254" in text:
        text = (
            "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass key and secret, "
            "or anon=True, as storage_options"
        )
    return options.scrub(" ".join(text.split())[:500])


def _lasting(kind: type[StorageError], text: str, code: int = errno.EREMOTEIO) -> StorageError:
    error = kind(text)
    error.errno = code
    return error
