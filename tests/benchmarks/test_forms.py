"""Forms of parts of a step that benchmarks/forms.py times beside each other compute the same, on a CPU."""

import pytest
import torch
from short import slow_but

from benchmarks import forms
from benchmarks.gpu import Bench
from float8 import Float8Matmul

# How far the results of each form may be from those of the first, of the largest number. Of what changes rounding, one
# or two steps of the dtype in which it rounds, at the largest number; the gradients with D are sums of such numbers.
FP32, BF16 = 2**-20, 2**-7
APART = {
    'forms of the loss': {'with E': 0, 'without A': BF16, 'without C': BF16, 'without both': BF16, 'eager': BF16},
    'forms of attention': {'without D': 2 * BF16},
    'forms of a layer': {'without G': BF16},
    'forms of a block': {'with I': 0},
    'forms of the ends': {'with F': BF16, 'with H': FP32},
    'forms of the update': {'without B': 0, 'with F6': FP32},
    'forms of one rank': {'with J': 0},
}


def test_ways_that_are_compared_take_turns():
    calls = []

    def way(name, results):
        return lambda: calls.append(name) or results

    ways = {'a': way('a', [torch.tensor([4.0]), torch.tensor([2.0, -1.0])]), 'none': way('none', None)}
    ways |= {'b ms': way('b', [torch.tensor([4.0]), torch.tensor([2.0, -1.5])])}
    found = forms.in_turns(torch.device('cpu'), ways, rounds=3)
    assert calls == ['a', 'none', 'b'] * 5 and [*found] == ['a', 'none', 'b ms', 'b, apart']
    assert found.pop('b, apart') == 0.25 and min(found.values()) >= 0


@pytest.mark.parametrize('name', slow_but(['forms of the loss'], APART))
def test_a_form_computes_what_todays_does(tmp_path, name):
    bench = Bench('cpu', tmp_path)
    found = bench.run(bench.inner(name, of='124M'))
    assert 'error' not in found and found.keys() >= {f'{form} ms' for form in APART[name]}, found
    for form, bound in APART[name].items():
        assert found[f'{form}, apart'] <= bound, form


def test_float8_that_keeps_transposed_inputs_multiplies_as_today(monkeypatch):
    monkeypatch.setattr(forms, 'cast_both', forms.cast_both.__wrapped__)  # what is not compiled rounds alike
    results = []
    for function in (Float8Matmul, forms.KeptTransposed):
        torch.manual_seed(0)
        x, weight = torch.randn(48, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        y = function.apply(x, weight)
        y.backward(torch.randn(48, 16))
        results.append((y, x.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
