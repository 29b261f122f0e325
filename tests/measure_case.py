"""The laws that every measure obeys, written once: a new measure inherits them all.

A subclass of `MeasureCase` says how its law is made and how large its tokens are. `BatchedCase`
adds batches, `OracleCase` the comparison with exact values from mpmath. Tolerances are laws in
the machine precision eps, the tilt |a| and the scale r of the tokens, never numbers found by trial:

    tilted mean         (1e-12 + 8 eps |a| r) r      a score a.x of size |a| r carries an error of
    tilted covariance   (1e-12 + 8 eps |a| r) r^2    eps |a| r, which is the relative error of a
    log-MGF             (1e-12 + 8 eps |a| r) |a| r  weight exp(a.x); kappa is the mean's integral

In float32 the floor 1e-12 is 16 eps: parameters and query are themselves rounded.
"""

import inspect
import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jacrev, vmap

from measureattn import Empirical, Measure
from measureattn.streaming import TiltedSums

F32, F64 = torch.float32, torch.float64
STANDARD_ERRORS = 4.5
SIZES = (1e-8, 1e-6, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e4)


def bound(a, scale, power):
    """The largest error that rounding explains, one number a tilt (see the module's text)."""
    eps = torch.finfo(a.dtype).eps
    floor = 1e-12 if a.dtype == F64 else 16 * eps
    return (floor + 8 * eps * a.norm(dim=-1).double() * scale) * scale**power


def assert_close(value, expected, a, scale, power):
    """value = expected within the law of `bound`; the axes after the tilts are the tokens'."""
    assert value.shape == expected.shape
    allowed = bound(a, scale, power)
    allowed = allowed.reshape(*allowed.shape, *[1] * power)
    error = (value.double() - expected.double()).abs()
    assert (error <= allowed).all(), f"error {error.max():.3g}, allowed {allowed.min():.3g}"


def assert_close_log_mgf(value, expected, a, scale):
    assert value.shape == expected.shape
    error = (value.double() - expected.double()).abs()
    allowed = bound(a, scale, 1) * a.norm(dim=-1).double()
    assert (error <= allowed).all(), f"error {error.max():.3g}, allowed {allowed.min():.3g}"


def assert_within_standard_errors(error, std_error, detectable, rounding):
    """A Monte Carlo error below 4.5 standard errors, in a test that is fine enough to matter.

    `detectable` is the error that must not go unseen: at least five standard errors.
    """
    assert 5 * std_error.max() <= detectable, "draw more: this test would miss what it is for"
    assert (error.abs() <= STANDARD_ERRORS * std_error + rounding).all()


def generator(seed=20251211):
    return torch.Generator().manual_seed(seed)


class MeasureCase:
    """What a law without batches inherits."""

    dim: int
    # r: the length of a typical large token, at least the spread of the law. Coordinates of tilts
    # go up to 5/r: where kappa is finite in a domain only, r has to keep them inside.
    scale: float
    variants = ("single",)
    n_sample = 40_000
    n_queries = 6

    def make(self, dtype, device, batched=False, **options) -> Measure:
        raise NotImplementedError

    def draw(self, law, n, generator, dtype, device):
        """Tokens of the law; laws that follow the query need to be told the dtype."""
        return law.sample(n, generator=generator, dtype=dtype, device=device)

    def queries(self, dtype, device, batched, size=2.0):
        """Six tilts of sizes up to `size` over the scale, (6, D), or (6, 1, D) for a batch."""
        n = self.n_queries
        a = torch.randn(n, self.dim, generator=generator(7), dtype=F64)
        a = a / a.norm(dim=-1, keepdim=True) * torch.linspace(0.2, 1, n, dtype=F64)[:, None]
        a = (a * size / self.scale).to(device, dtype)
        return a[:, None, :] if batched else a

    def spread(self, a, law):
        """The tilts broadcast against the law's batch, as all results are."""
        return a.expand(*torch.broadcast_shapes(a.shape[:-1], law.batch_shape), self.dim)

    # -- kappa and its derivatives --------------------------------------------------------------

    def test_kappa_is_zero_at_zero(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        zero = torch.zeros(*law.batch_shape, self.dim, dtype=dtype, device=device)
        assert (law.log_mgf(zero) == 0).all()

    def test_tilted_moments_are_derivatives_by_autograd(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        a = self.spread(self.queries(dtype, device, batched), law)
        leaf = a.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(law.log_mgf(leaf).sum(), leaf)
        assert_close(law.tilted_mean(a), gradient, a, self.scale, 1)
        # one Hessian a tilt: the tilts of a batch do not mix
        for row in a:
            full = jacrev(jacrev(lambda t: law.log_mgf(t).sum()))(row)
            own = full if not law.batch_shape else torch.einsum("bibj->bij", full)
            assert_close(law.tilted_cov(row), own, row, self.scale, 2)

    def test_tilted_mean_is_the_slope_by_finite_differences(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.spread(self.queries(F64, device, batched), law)
        eps, r = torch.finfo(F64).eps, self.scale
        h = eps ** (1 / 3) / r
        steps = h * torch.eye(self.dim, dtype=F64, device=device)
        slopes = [(law.log_mgf(a + s) - law.log_mgf(a - s)) / (2 * h) for s in steps]
        # h^2/6 times the third cumulant, at most (2r)^3, and the rounding of kappa over h
        kappa = law.log_mgf(a).abs().max()
        allowed = h**2 / 6 * (2 * r) ** 3 + 8 * eps * (1 + kappa) / h
        assert ((torch.stack(slopes, -1) - law.tilted_mean(a)).abs() <= allowed).all()

    def test_tilted_cov_is_the_curvature_by_finite_differences(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.spread(self.queries(F64, device, batched), law)
        eps, r = torch.finfo(F64).eps, self.scale
        h = eps ** (1 / 4) / r
        steps = h * torch.eye(self.dim, dtype=F64, device=device)
        cov = law.tilted_cov(a)
        # h^2/3 times the fourth cumulant, at most (2r)^4, and the rounding of kappa over h^2
        kappa = law.log_mgf(a).abs().max()
        allowed = h**2 / 3 * (2 * r) ** 4 + 8 * eps * (1 + kappa) / h**2
        for i, s in enumerate(steps):
            for j, t in enumerate(steps):
                up = law.log_mgf(a + s + t) - law.log_mgf(a + s - t)
                down = law.log_mgf(a - s + t) - law.log_mgf(a - s - t)
                assert ((up - down) / (4 * h**2) - cov[..., i, j]).abs().max() <= allowed

    def test_tilted_cov_is_symmetric_and_positive(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        a = self.spread(self.queries(dtype, device, batched), law)
        cov = law.tilted_cov(a)
        assert_close(cov, cov.mT, a, self.scale, 2)
        smallest = torch.linalg.eigvalsh(cov.double())[..., 0]
        assert (smallest >= -self.dim * bound(a, self.scale, 2)).all()

    def test_tilted_cov_product_is_the_product(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        a = self.spread(self.queries(dtype, device, batched), law)
        w = torch.randn(a.shape, generator=generator(3), dtype=F64).to(device, dtype)
        w = w / w.norm(dim=-1, keepdim=True)
        product = (law.tilted_cov(a) @ w[..., None])[..., 0]
        # entry by entry an error of a covariance (r^2), here summed over D of them
        error = (law.tilted_cov_product(a, w) - product).abs().double()
        assert (error <= self.dim * bound(a, self.scale, 2)[..., None]).all()
        one = w[0] if not batched else w[0, 0]  # one direction for all tilts
        expected = (law.tilted_cov(a) @ one[..., None])[..., 0]
        error = (law.tilted_cov_product(a, one) - expected).abs().double()
        assert (error <= self.dim * bound(a, self.scale, 2)[..., None]).all()

    def test_defaults_of_the_base_class_are_the_closed_forms(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        a = self.queries(dtype, device, batched)
        wide = self.spread(a, law)
        w = torch.ones_like(a) / math.sqrt(self.dim)
        assert_close(law.tilted_mean(a), Measure.tilted_mean(law, a), wide, self.scale, 1)
        assert_close(law.tilted_cov(a), Measure.tilted_cov(law, a), wide, self.scale, 2)
        default = Measure.tilted_cov_product(law, a, w)
        error = (law.tilted_cov_product(a, w) - default).abs().double()
        assert (error <= self.dim * bound(wide, self.scale, 2)[..., None]).all()

    def test_mean_and_cov_are_the_tilted_ones_at_zero(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        zero = torch.zeros(*law.batch_shape, self.dim, dtype=law.mean.dtype, device=device)
        assert law.mean.shape == (*law.batch_shape, self.dim)
        assert law.cov.shape == (*law.batch_shape, self.dim, self.dim)
        assert torch.equal(law.mean.to(device), law.tilted_mean(zero))
        assert torch.equal(law.cov.to(device), law.tilted_cov(zero))

    def test_kappa_is_convex(self, device, batched):
        law = self.make(F64, device, batched)
        point = st.lists(st.floats(-5, 5), min_size=self.dim, max_size=self.dim)

        @given(point, point, st.floats(0, 1))
        def convex(start, end, t):
            start, end = (
                torch.tensor(x, dtype=F64, device=device) / self.scale for x in (start, end)
            )
            a = torch.stack([start, t * start + (1 - t) * end, end])
            a = a.reshape(3, *[1] * len(law.batch_shape), self.dim)
            start_value, between, end_value = law.log_mgf(a)
            chord = t * start_value + (1 - t) * end_value
            size = torch.maximum(start.norm(), end.norm()) * self.scale
            rounding = 8 * torch.finfo(F64).eps * (1 + size) ** 2
            assert (between <= chord + rounding).all()

        convex()

    # -- shapes, dtypes, devices ----------------------------------------------------------------

    def test_shapes(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        between = [1] * len(law.batch_shape)
        for query in ((), (5, *between), (5, 1, *between)):
            a = torch.full((*query, self.dim), 0.1 / self.scale, dtype=dtype, device=device)
            shape = torch.broadcast_shapes(query, law.batch_shape)
            assert law.log_mgf(a).shape == shape
            assert law.tilted_mean(a).shape == (*shape, self.dim)
            assert law.tilted_cov(a).shape == (*shape, self.dim, self.dim)
            assert law.tilted_cov_product(a, a).shape == (*shape, self.dim)

    def test_results_keep_dtype_and_device(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        a = self.queries(dtype, device, batched)
        sample = self.draw(law, 4, generator(), dtype, device)
        results = law.log_mgf(a), law.tilted_mean(a), law.tilted_cov(a), sample
        for result in (*results, law.tilted_cov_product(a, a)):
            assert result.dtype == dtype
            assert result.device.type == device.type

    def test_a_query_does_not_depend_on_its_neighbours(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.queries(F64, device, batched)
        for whole, each in zip(law.tilted_mean(a), a, strict=True):
            assert_close(whole, law.tilted_mean(each), self.spread(each, law), self.scale, 1)

    def test_float32_is_float64_rounded(self, device, batched):
        small, large = (self.make(dtype, device, batched) for dtype in (F32, F64))
        a = self.queries(F32, device, batched)
        wide = self.spread(a, small)
        b = a.double()
        assert_close_log_mgf(small.log_mgf(a), large.log_mgf(b), wide, self.scale)
        assert_close(small.tilted_mean(a), large.tilted_mean(b), wide, self.scale, 1)
        assert_close(small.tilted_cov(a), large.tilted_cov(b), wide, self.scale, 2)

    # -- samples --------------------------------------------------------------------------------

    def test_sample_has_the_mean_and_covariance(self, device, batched):
        # sees an error of 0.05 r in a mean and of 0.05 r^2 in a covariance
        law = self.make(F64, device, batched)
        n, r = self.n_sample, self.scale
        tokens = self.draw(law, n, generator(), F64, device)
        assert tokens.shape == (*law.batch_shape, n, self.dim)
        mean, cov = law.mean.to(tokens), law.cov.to(tokens)
        std_error = (cov.diagonal(dim1=-2, dim2=-1) / n).sqrt()
        assert_within_standard_errors(tokens.mean(-2) - mean, std_error, 0.05 * r, 1e-12 * r)
        centred = tokens - mean[..., None, :]
        products = centred[..., :, None] * centred[..., None, :]
        std_error = products.std(-3) / math.sqrt(n)
        error = products.mean(-3) - cov
        assert_within_standard_errors(error, std_error, 0.05 * r**2, 1e-12 * r**2)

    def test_weighted_sample_has_the_tilted_mean_and_covariance(self, device, batched):
        # at a tilt of 0.3 / r the weights exp(a.x) are mild; sees 0.05 r and 0.05 r^2
        law = self.make(F64, device, batched)
        n, r = self.n_sample, self.scale
        a = torch.linspace(1, 2, self.dim, dtype=F64, device=device)
        a = 0.3 / r * a / a.norm()
        tokens = self.draw(law, n, generator(), F64, device)
        weights = torch.softmax(tokens @ a, -1)
        centred = tokens - law.tilted_mean(a)[..., None, :]
        products = centred[..., :, None] * centred[..., None, :]
        error = (weights[..., None] * centred).sum(-2)
        std_error = (weights[..., None] * (centred - error[..., None, :])).norm(dim=-2)
        assert_within_standard_errors(error, std_error, 0.05 * r, 1e-12 * r)
        second = (weights[..., None, None] * products).sum(-3)
        influence = weights[..., None, None] * (products - second[..., None, :, :])
        std_error = influence.square().sum(-3).sqrt()
        error = second - law.tilted_cov(a)
        assert_within_standard_errors(error, std_error, 0.05 * r**2, 1e-12 * r**2)

    def test_sampling_is_repeatable_and_private(self, device, batched):
        law = self.make(F64, device, batched)
        before = torch.get_rng_state()
        one, same, other = (
            self.draw(law, 50, generator(seed), F64, device) for seed in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        running = generator(1)
        self.draw(law, 50, running, F64, device)
        assert not torch.equal(self.draw(law, 50, running, F64, device), one)
        assert torch.equal(torch.get_rng_state(), before)
        assert self.draw(law, 0, running, F64, device).shape == (*law.batch_shape, 0, self.dim)

    # -- at home in torch -----------------------------------------------------------------------

    def test_vmap(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.queries(F64, device, batched)
        wide = self.spread(a, law)
        assert_close_log_mgf(vmap(law.log_mgf)(a), law.log_mgf(a), wide, self.scale)
        assert_close(vmap(law.tilted_mean)(a), law.tilted_mean(a), wide, self.scale, 1)
        assert_close(vmap(law.tilted_cov)(a), law.tilted_cov(a), wide, self.scale, 2)

    def test_derivatives_of_the_mean_and_of_a_function_of_it(self, device, batched):
        law = self.make(F64, device, batched)
        for a in self.queries(F64, device, batched):
            a = a.reshape(self.dim)
            wide = self.spread(a, law)
            assert_close(jacrev(law.tilted_mean)(a), law.tilted_cov(a), wide, self.scale, 2)
            slope = grad(lambda t: law.tilted_mean(t).square().sum() / 2)(a)
            expected = law.tilted_cov_product(a, law.tilted_mean(a))
            expected = expected.reshape(-1, self.dim).sum(0)
            allowed = self.dim * bound(wide, self.scale, 3).sum()
            assert (slope - expected).abs().max() <= allowed

    def test_inference_mode(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.queries(F64, device, batched)
        expected = law.log_mgf(a), law.tilted_mean(a), law.tilted_cov(a)
        with torch.inference_mode():
            inside = law.log_mgf(a), law.tilted_mean(a), law.tilted_cov(a)
        assert all(map(torch.equal, inside, expected))

    @pytest.mark.usefixtures("no_shape_hook")  # the compiler shall see what a user runs
    def test_compiles_in_one_graph(self, device, monkeypatch):
        batched = "batched" in self.variants  # once a law: compiling costs a second
        # the compiler cannot follow the tests' shape checks into an object made on the way
        for name, method in inspect.getmembers(TiltedSums, inspect.isfunction):
            monkeypatch.setattr(TiltedSums, name, inspect.unwrap(method))
        law = self.make(F64, device, batched)
        a = self.queries(F64, device, batched)
        wide = self.spread(a, law)
        torch.compiler.reset()
        log_mgf, mean = (
            torch.compile(method, backend="eager", fullgraph=True)(a)
            for method in (law.log_mgf, law.tilted_mean)
        )
        assert_close_log_mgf(log_mgf, law.log_mgf(a), wide, self.scale)
        assert_close(mean, law.tilted_mean(a), wide, self.scale, 1)

    def test_to_converts_and_comes_back(self, device, batched):
        law = self.make(F64, device, batched)
        small = law.to(F32)
        a = self.queries(F32, device, batched)
        wide, expected = self.spread(a, law), law.tilted_mean(a.double())
        assert small.batch_shape == law.batch_shape
        assert repr(small) == repr(law)
        assert small.tilted_mean(a).dtype == F32
        assert_close(small.tilted_mean(a), expected, wide, self.scale, 1)
        back = small.to(F64)
        assert back.tilted_mean(a.double()).dtype == F64
        assert_close(back.tilted_mean(a.double()), expected, wide, self.scale, 1)
        # the law itself has not changed
        assert torch.equal(law.tilted_mean(a.double()), expected)

    def test_shapes_without_numbers(self, device, batched):
        law = self.make(F64, device, batched)
        a = self.queries(F64, device, batched)
        there, far = law.to("meta"), a.to("meta")
        assert there.batch_shape == law.batch_shape
        assert there.log_mgf(far).is_meta
        assert there.log_mgf(far).shape == law.log_mgf(a).shape
        assert there.tilted_mean(far).shape == law.tilted_mean(a).shape
        assert there.tilted_cov(far).shape == law.tilted_cov(a).shape

    def test_expand_repeats_the_law(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        shape = (2, *law.batch_shape)
        wide = law.expand(shape)
        assert wide.batch_shape == shape
        a = self.queries(dtype, device, batched)
        a = torch.stack([a, -a], 1)  # another tilt for each of the two
        for i in range(2):
            tilts = self.spread(a[:, i], law)
            log_mgf, mean, cov = (
                getattr(wide, name)(a)[:, i] for name in ("log_mgf", "tilted_mean", "tilted_cov")
            )
            assert_close_log_mgf(log_mgf, law.log_mgf(a[:, i]), tilts, self.scale)
            assert_close(mean, law.tilted_mean(a[:, i]), tilts, self.scale, 1)
            assert_close(cov, law.tilted_cov(a[:, i]), tilts, self.scale, 2)
        tokens = self.draw(wide, 5, generator(), dtype, device)
        assert tokens.shape == (*shape, 5, self.dim)
        assert law.batch_shape == shape[1:]

    def test_expand_refuses_what_does_not_fit(self, device):
        wide = self.make(F64, device).expand((2, 3))
        for shape, words in (((2, 4), "must broadcast"), ((3,), "is smaller than the measure's")):
            with pytest.raises(ValueError, match=words):
                wide.expand(shape)

    def test_a_sample_is_a_prompt(self, dtype, device, batched):
        law = self.make(dtype, device, batched)
        prompt = Empirical(self.draw(law, 6, generator(), dtype, device))
        assert prompt.batch_shape == law.batch_shape
        assert prompt.tokens.shape == (*law.batch_shape, 6, self.dim)
        assert (prompt.tokens.dtype, prompt.tokens.device.type) == (dtype, device.type)
        a = self.queries(dtype, device, batched)
        assert prompt.tilted_mean(a).shape == law.tilted_mean(a).shape

    def test_repr_names_the_law(self, device, batched):
        law = self.make(F64, device, batched)
        assert type(law).__name__ in repr(law)
        assert f"dim={self.dim}" in repr(law)

    def test_value_checks_can_be_switched_off(self, device, batched):
        a = self.queries(F64, device, batched)
        a[0] = torch.nan
        with pytest.raises(ValueError, match="a must be finite; found nan"):
            self.make(F64, device, batched).tilted_mean(a)
        unchecked = self.make(F64, device, batched, validate_args=False)
        mean = unchecked.tilted_mean(a)
        assert mean[0].isnan().any()
        assert mean[1:].isfinite().all()


class BatchedCase(MeasureCase):
    """A law that comes in batches: `make(batched=True)` holds `member(0)`, `member(1)`, ..."""

    variants = ("single", "batched")
    batch = 3

    def member(self, i, dtype, device) -> Measure:
        raise NotImplementedError

    def test_a_batch_is_its_members(self, dtype, device):
        law = self.make(dtype, device, batched=True)
        assert law.batch_shape == (self.batch,)
        a = self.queries(dtype, device, batched=False)
        asked = a[:, None, :]
        for i in range(self.batch):
            one = self.member(i, dtype, device)
            assert_close_log_mgf(law.log_mgf(asked)[:, i], one.log_mgf(a), a, self.scale)
            assert_close(law.tilted_mean(asked)[:, i], one.tilted_mean(a), a, self.scale, 1)
            assert_close(law.tilted_cov(asked)[:, i], one.tilted_cov(a), a, self.scale, 2)
            product = law.tilted_cov_product(asked, asked)[:, i]
            error = (product - one.tilted_cov_product(a, a)).abs().double()
            size = a.norm(dim=-1).double()
            assert (error <= (self.dim * bound(a, self.scale, 2) * size)[:, None]).all()

    def test_members_differ(self, device):
        a = self.queries(F64, device, batched=True)[-1]
        means = self.make(F64, device, batched=True).tilted_mean(a)  # at 0 all of them may be 0
        assert not torch.equal(means[0], means[1])

    def test_equal_sizes_pair_up(self, dtype, device):
        law = self.make(dtype, device, batched=True)
        a = self.queries(dtype, device, batched=False)[: self.batch]
        paired = law.tilted_mean(a)
        assert paired.shape == (self.batch, self.dim)
        for i in range(self.batch):
            expected = self.member(i, dtype, device).tilted_mean(a[i])
            assert_close(paired[i], expected, a[i], self.scale, 1)

    def test_members_are_sampled_independently(self, device):
        tokens = self.make(F64, device, batched=True).sample(2_000, generator=generator())
        tiny = torch.finfo(F64).tiny  # a coordinate may be constant
        first, second = ((x - x.mean(0)) / x.std(0).clamp(min=tiny) for x in tokens[:2])
        # correlations of independent samples have standard error 1 / sqrt(n)
        assert (first.mT @ second / 2_000).abs().max() <= STANDARD_ERRORS / math.sqrt(2_000)


class FromNumbers(BatchedCase):
    """A law made of tensors: `numbers(i)` of member i, stacked for the batch, `law` of them."""

    shared = ()  # names of tensors that all members have in common: these are not stacked

    def numbers(self, i) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def law(self, options, **numbers) -> Measure:
        raise NotImplementedError

    def member(self, i, dtype, device, **options):
        numbers = self.numbers(i)
        return self.law(options, **{k: v.to(device, dtype) for k, v in numbers.items()})

    def make(self, dtype, device, batched=False, **options):
        if not batched:
            return self.member(0, dtype, device, **options)
        members = [self.numbers(i) for i in range(self.batch)]
        stacked = {
            k: v if k in self.shared else torch.stack([m[k] for m in members])
            for k, v in members[0].items()
        }
        return self.law(options, **{k: v.to(device, dtype) for k, v in stacked.items()})


class OracleCase:
    """Comparison with `oracle(a)`: kappa, tilted mean, tilted covariance, in 60 digits."""

    direction: tuple  # of the tilts; at no small angle to the mean, so that kappa is well defined

    def oracle(self, a):
        """(kappa, [mean], [[cov]]) of make(float64) at a list of mpmath numbers."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", SIZES)
    def test_exact_values(self, device, size):
        law = self.make(F64, device)
        a = torch.tensor(self.direction, dtype=F64)
        a = size * a / a.norm()
        with mpmath.workdps(60):
            kappa, mean, cov = self.oracle([mpmath.mpf(x) for x in a.tolist()])
            a = a.to(device)
            got = mpmath.mpf(law.log_mgf(a).item())
            assert abs(got - kappa) <= 1e-12 * abs(kappa)
            mean, cov = ([[float(x) for x in row] for row in part] for part in ([mean], cov))
        mean, cov = (torch.tensor(x, dtype=F64, device=device) for x in (mean[0], cov))
        assert_close(law.tilted_mean(a), mean, a, self.scale, 1)
        assert_close(law.tilted_cov(a), cov, a, self.scale, 2)
        w = torch.ones_like(a)
        error = (law.tilted_cov_product(a, w) - cov @ w).abs()
        assert (error <= self.dim * bound(a, self.scale, 2)).all()


def assert_refused(call, kind, *words):
    """The call raises exactly `kind`, in words that say what was wrong and how to repair it."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind  # not a subclass that some library raised
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def atoms_oracle(points, weights, a):
    """kappa, mean and covariance of weighted atoms, straight from the definition."""
    points = [[mpmath.mpf(x) for x in p] for p in points]
    weights = [mpmath.mpf(w) for w in weights]
    total = mpmath.fsum(weights)
    masses = [w * mpmath.exp(mpmath.fdot(a, p)) for w, p in zip(weights, points, strict=True)]
    mass = mpmath.fsum(masses)
    tilted = [m / mass for m in masses]
    axes = range(len(a))
    mean = [mpmath.fsum(t * p[i] for t, p in zip(tilted, points, strict=True)) for i in axes]
    cov = [
        [
            mpmath.fsum(
                t * (p[i] - mean[i]) * (p[j] - mean[j])
                for t, p in zip(tilted, points, strict=True)
            )
            for j in axes
        ]
        for i in axes
    ]
    return mpmath.log(mass / total), mean, cov
