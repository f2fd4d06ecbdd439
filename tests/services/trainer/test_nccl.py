"""NCCL's library as far as it goes without a GPU; test_nccl_transfer.py of the generator has the
rest."""

import ctypes

import pytest
import torch

from services.common.errors import UserError
from services.trainer import nccl
from services.trainer.nccl import ID_BYTES, Library, NcclTransport
from services.trainer.weight_sending import TransferFailed


def library() -> Library:
    try:
        return Library()
    except OSError:
        pytest.skip("there is no libnccl.so.2 here")


def test_a_trainer_without_a_gpu_is_told_what_to_do() -> None:
    with pytest.raises(UserError, match=r'weights\.transport: "nccl".*on cpu; set it to "grpc"'):
        NcclTransport(torch.device("cpu"))


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"needs NCCL \(libnothing\.so\.2\)"):
        NcclTransport(torch.device("cuda", 0), library="libnothing.so.2")


def test_a_library_that_lacks_a_function_is_named() -> None:
    with pytest.raises(UserError, match="ncclGetUniqueId"):
        NcclTransport(torch.device("cuda", 0), library="libc.so.6")


def test_the_configuration_has_ncclconfigs_layout() -> None:
    """That of NCCL 2.18 on 64 bits, which newer ones go on from."""
    assert ctypes.sizeof(nccl._Config) == 48
    assert nccl._Config.blocking.offset == 16
    assert nccl._Config.net_name.offset == 32
    assert nccl._non_blocking().blocking == 0


def test_groups_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    transport = NcclTransport(torch.device("cuda", 0))
    one, other = transport.new_id(), transport.new_id()
    assert len(one) == len(other) == ID_BYTES
    assert one != other


def test_an_error_of_nccl_says_what_it_is() -> None:
    loaded = library()
    with pytest.raises(TransferFailed, match=r"ncclCommGetAsyncError: invalid"):
        loaded.call("ncclCommGetAsyncError", None, ctypes.byref(ctypes.c_int()))
