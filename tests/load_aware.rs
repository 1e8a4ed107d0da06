//! PEC's load-aware choice: compared with all choices on small sizes, and properties for all inputs and over time.

use super::common::all;
use evermoe::selection::{Selection, TokenLedger, load_aware};
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A choice to make.
#[derive(Clone, Debug)]
struct Case {
    shape: [usize; 2],
    tokens: Vec<i64>,
    waiting: Vec<i64>,
    ranks: Vec<i64>,
    each: usize,
    checkpoint: u64,
}

impl Case {
    fn choose(&self) -> Selection {
        let Self { shape, tokens, waiting, ranks, each, checkpoint } = self;
        load_aware(tokens, Some(waiting), Some(ranks), *shape, *each, *checkpoint).unwrap()
    }

    fn turns(&self) -> i64 {
        self.shape[1].div_ceil(self.each.min(self.shape[1])) as i64
    }

    /// Cells with unsaved tokens and a rank, in the order of the documentation.
    fn order(&self) -> Vec<usize> {
        let [layers, experts] = self.shape;
        let place = |cell: usize| (cell / experts + layers - self.checkpoint as usize % layers) % layers;
        let is_overdue = |cell: usize| self.waiting[cell] >= 2 * self.turns();
        let mut cells: Vec<usize> =
            (0..layers * experts).filter(|&cell| self.tokens[cell] > 0 && self.ranks[cell] >= 0).collect();
        cells.sort_by_key(|&cell| {
            let wait = if is_overdue(cell) { self.waiting[cell] } else { 0 };
            (Reverse(wait), place(cell), Reverse(self.tokens[cell]), cell)
        });
        cells
    }

    /// How many experts each layer gets.
    fn wanted(&self) -> Vec<usize> {
        let count = |layer: usize| self.order().iter().filter(|&&cell| cell / self.shape[1] == layer).count();
        (0..self.shape[0]).map(|layer| count(layer).min(self.each)).collect()
    }

    /// Those that are chosen whatever the shares are.
    fn musts(&self) -> BTreeSet<usize> {
        let mut left = self.wanted();
        let mut found = BTreeSet::new();
        for cell in self.order().into_iter().filter(|&cell| self.waiting[cell] >= 3 * self.turns()) {
            let layer = cell / self.shape[1];
            if left[layer] > 0 {
                left[layer] -= 1;
                found.insert(cell);
            }
        }
        found
    }

    fn share(&self) -> usize {
        let ranks: BTreeSet<i64> = self.ranks.iter().copied().filter(|&rank| rank >= 0).collect();
        (self.each.min(self.shape[1]) * self.shape[0]).div_ceil(ranks.len().max(1))
    }

    fn by_rank(&self, cells: impl IntoIterator<Item = usize>) -> BTreeMap<i64, usize> {
        let mut found = BTreeMap::new();
        cells.into_iter().for_each(|cell| *found.entry(self.ranks[cell]).or_default() += 1);
        found
    }

    /// The most that a rank copies beyond what it must, and the least share with which that is allowed.
    fn level(&self, cells: &BTreeSet<usize>) -> usize {
        let (all, musts) = (self.by_rank(cells.iter().copied()), self.by_rank(self.musts()));
        let beyond =
            |(rank, &count): (&i64, &usize)| (count > *musts.get(rank).unwrap_or(&0)).then_some(count);
        all.iter().filter_map(beyond).max().unwrap_or(0).max(self.share())
    }

    /// Of all choices of this number of experts of each layer that have all musts those with the least share, of these the one
    /// that is first in the order.
    fn best(&self) -> BTreeSet<usize> {
        let (order, wanted, musts) = (self.order(), self.wanted(), self.musts());
        let mut best: Option<(usize, Vec<bool>, BTreeSet<usize>)> = None;
        for bits in 0..1_u32 << order.len() {
            let cells: BTreeSet<usize> =
                (0..order.len()).filter(|&at| bits >> at & 1 == 1).map(|at| order[at]).collect();
            let count = |layer: usize| cells.iter().filter(|&&cell| cell / self.shape[1] == layer).count();
            let is_choice =
                (0..self.shape[0]).all(|layer| count(layer) == wanted[layer]) && musts.is_subset(&cells);
            if !is_choice {
                continue;
            }
            let left: Vec<bool> = order.iter().map(|cell| !cells.contains(cell)).collect();
            let found = (self.level(&cells), left, cells);
            if best.as_ref().is_none_or(|best| (found.0, &found.1) < (best.0, &best.1)) {
                best = Some(found);
            }
        }
        best.unwrap().2
    }

    fn cells(&self, chosen: &Selection) -> BTreeSet<usize> {
        assert_eq!(chosen.len(), self.shape[0]);
        let mut cells = BTreeSet::new();
        for (layer, row) in chosen.iter().enumerate() {
            assert!(row.is_sorted_by(|a, b| a < b), "layer {layer}: {row:?}");
            cells.extend(row.iter().map(|expert| layer * self.shape[1] + expert));
        }
        cells
    }

    /// K of each layer, those that must be, nothing that saves nothing.
    fn check(&self) {
        let chosen = self.choose();
        let counts: Vec<usize> = chosen.iter().map(Vec::len).collect();
        assert_eq!(counts, self.wanted(), "{chosen:?} of {self:?}");
        let cells = self.cells(&chosen);
        assert!(cells.iter().all(|&cell| self.tokens[cell] > 0 && self.ranks[cell] >= 0), "{chosen:?}");
        assert!(self.musts().is_subset(&cells), "{chosen:?} of {self:?}");
    }
}

#[test]
fn it_is_the_best_of_all_choices_on_all_small_sizes() {
    let mut number = 0_u64;
    for shape in [[1, 4], [2, 2], [2, 3], [3, 2]] {
        let size = shape[0] * shape[1];
        for tokens in all(size, 2) {
            for ranks in all(size, 2).into_iter().step_by(3) {
                for each in [1, 2] {
                    // Waits around both bounds, another one in each case.
                    number = number
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let wait = |cell: usize| (number >> (8 * cell % 56) & 255) as i64;
                    let waiting = (0..size).map(|cell| (wait(cell) % 12).saturating_sub(3).max(0)).collect();
                    let ranks = ranks.to_vec();
                    let checkpoint = number >> 60;
                    let case = Case { shape, tokens: tokens.clone(), waiting, ranks, each, checkpoint };
                    let chosen = case.choose();
                    assert_eq!(case.cells(&chosen), case.best(), "{case:?}");
                }
            }
        }
    }
}

fn counted(chosen: &Selection) -> Vec<usize> {
    chosen.iter().map(Vec::len).collect()
}

#[test]
fn a_layer_never_gets_more_than_its_k_however_many_ranks_there_are() {
    // One layer, two experts on two ranks.
    let chosen = load_aware(&[5, 3], None, Some(&[0, 1]), [1, 2], 1, 0).unwrap();
    assert_eq!(chosen, [[0]]);
    // Six layers of eight experts, one of each on each of eight ranks: one of each layer, on ranks of their own.
    let tokens: Vec<i64> = (0..48).map(|cell| 100 - (cell * 7) % 48).collect();
    let ranks: Vec<i64> = (0..48).map(|cell| cell % 8).collect();
    for checkpoint in 0..6 {
        let chosen = load_aware(&tokens, None, Some(&ranks), [6, 8], 1, checkpoint).unwrap();
        assert_eq!(counted(&chosen), [1; 6]);
        let of: BTreeSet<usize> = chosen.iter().flatten().copied().collect();
        assert_eq!(of.len(), 6, "no rank saves two: {chosen:?}");
    }
    // Four layers of 64 on 64 ranks: four experts, not 64.
    let ranks: Vec<i64> = (0..256).map(|cell| cell % 64).collect();
    let chosen = load_aware(&[9; 256], None, Some(&ranks), [4, 64], 1, 0).unwrap();
    assert_eq!(counted(&chosen), [1; 4]);
    assert_eq!(chosen.iter().flatten().collect::<BTreeSet<_>>().len(), 4);
}

fn case() -> impl Strategy<Value = Case> {
    (1_usize..6, 1_usize..9, 1_usize..5, 1_i64..9, 0_u64..50).prop_flat_map(
        |(layers, experts, each, ranks, checkpoint)| {
            let size = layers * experts;
            let tokens = prop_oneof![2 => Just(0), 3 => 1_i64..4, 1 => 100_i64..2000, 1 => Just(i64::MAX)];
            let waiting = prop_oneof![3 => Just(0), 3 => 0_i64..12, 1 => 20_i64..40];
            let rank = prop_oneof![1 => Just(-1_i64), 9 => 0..ranks];
            (
                prop::collection::vec(tokens, size),
                prop::collection::vec(waiting, size),
                prop::collection::vec(rank, size),
            )
                .prop_map(move |(tokens, waiting, ranks)| Case {
                    shape: [layers, experts],
                    tokens,
                    waiting,
                    ranks,
                    each,
                    checkpoint,
                })
        },
    )
}

/// A few layers of a few experts, most of which have tokens, on few ranks: units must be moved between these.
fn small_case() -> impl Strategy<Value = Case> {
    let shape = prop_oneof![Just([3_usize, 4_usize]), Just([4, 3]), Just([6, 2])];
    (shape, 1_usize..3, 2_i64..5, 0_u64..50).prop_flat_map(|(shape, each, ranks, checkpoint)| {
        let tokens = prop::collection::vec(0_i64..9, 12);
        (tokens, prop::collection::vec(0..ranks, 12)).prop_map(move |(tokens, ranks)| Case {
            shape,
            tokens,
            waiting: vec![0; 12],
            ranks,
            each,
            checkpoint,
        })
    })
}

/// The largest flow from node 0 to the last node: Ford and Fulkerson, one unit at a time.
fn largest_flow(mut room: Vec<Vec<usize>>) -> usize {
    fn push(room: &mut [Vec<usize>], at: usize, seen: &mut [bool]) -> bool {
        if at + 1 == room.len() {
            return true;
        }
        seen[at] = true;
        for next in 0..room.len() {
            if room[at][next] > 0 && !seen[next] && push(room, next, seen) {
                room[at][next] -= 1;
                room[next][at] += 1;
                return true;
            }
        }
        false
    }
    let mut flow = 0;
    loop {
        let mut seen = vec![false; room.len()];
        if !push(&mut room, 0, &mut seen) {
            return flow;
        }
        flow += 1;
    }
}

/// Whether each layer can get what it wants, the musts and others, with at most that number on each rank that has others.
fn is_possible(case: &Case, share: usize) -> bool {
    let (musts, layers) = (case.musts(), case.shape[0]);
    let taken = case.by_rank(musts.iter().copied());
    let ranks: Vec<i64> =
        case.ranks.iter().copied().filter(|&rank| rank >= 0).collect::<BTreeSet<_>>().into_iter().collect();
    let nodes = layers + ranks.len() + 2;
    let mut room = vec![vec![0; nodes]; nodes];
    room[0][1..=layers].copy_from_slice(&case.wanted());
    musts.iter().for_each(|cell| room[0][1 + cell / case.shape[1]] -= 1);
    for (at, rank) in ranks.iter().enumerate() {
        room[1 + layers + at][nodes - 1] = share.saturating_sub(*taken.get(rank).unwrap_or(&0));
    }
    for cell in case.order().into_iter().filter(|cell| !musts.contains(cell)) {
        let at = ranks.binary_search(&case.ranks[cell]).unwrap();
        room[1 + cell / case.shape[1]][1 + layers + at] += 1;
    }
    let wanted: usize = room[0].iter().sum();
    largest_flow(room) == wanted
}

proptest! {
    #[test]
    fn each_layer_gets_k_and_no_rank_more_than_the_least_share(case in case()) {
        case.check();
        let level = case.level(&case.cells(&case.choose()));
        prop_assert!(is_possible(&case, level), "{} is reached and said to be impossible: {:?}", level, case);
        if level > case.share() {
            prop_assert!(!is_possible(&case, level - 1), "{} would do: {:?}", level - 1, case);
        }
    }

    #[test]
    fn it_is_the_best_of_all_choices_of_twelve_experts(case in small_case()) {
        prop_assert_eq!(case.cells(&case.choose()), case.best(), "{:?}", case);
    }

    #[test]
    fn without_ranks_each_layer_gets_its_first_k(case in case()) {
        let free = Case { ranks: vec![0; case.tokens.len()], ..case };
        let Case { shape, tokens, waiting, each, checkpoint, .. } = &free;
        let chosen = load_aware(tokens, Some(waiting), None, *shape, *each, *checkpoint).unwrap();
        prop_assert_eq!(&chosen, &free.choose(), "all on one rank is as good as no ranks");
        for (layer, row) in chosen.iter().enumerate() {
            let first = free.order().into_iter().filter(|cell| cell / shape[1] == layer).take(*each);
            let first: BTreeSet<usize> = first.map(|cell| cell % shape[1]).collect();
            prop_assert_eq!(first, row.iter().copied().collect::<BTreeSet<_>>());
        }
    }
}

/// Runs a trace with a checkpoint after every step and returns the ledger and the longest anyone ever waited.
fn run(
    trace: &[Vec<i64>],
    shape: [usize; 2],
    each: usize,
    select: impl Fn(&TokenLedger) -> Selection,
) -> (TokenLedger, i64) {
    let mut ledger = TokenLedger::new(shape[0], shape[1], each, 1.0).unwrap();
    let mut longest = 0;
    for counts in trace {
        ledger.add(counts).unwrap();
        ledger.copied(&select(&ledger)).unwrap();
        longest = longest.max(*ledger.waiting().iter().max().unwrap());
    }
    (ledger, longest)
}

fn ours(ledger: &TokenLedger, ranks: Option<&[i64]>) -> Selection {
    let (tokens, each) = (ledger.at_risk(), ledger.experts_per_layer());
    load_aware(tokens, Some(ledger.waiting()), ranks, ledger.shape(), each, ledger.checkpoint()).unwrap()
}

/// Shapes, K, ranks, and a trace in which few experts are hot and many get a token now and then.
fn trace() -> impl Strategy<Value = ([usize; 2], usize, Vec<i64>, Vec<Vec<i64>>)> {
    (1_usize..5, 1_usize..8, 1_i64..5).prop_flat_map(|(layers, experts, ranks)| {
        let counts = prop_oneof![6 => Just(0), 2 => 1_i64..3, 1 => 100_i64..2000];
        let steps = prop::collection::vec(prop::collection::vec(counts, layers * experts), 1..60);
        let ranks = prop::collection::vec(0..ranks, layers * experts);
        (Just([layers, experts]), 1..=experts, ranks, steps)
    })
}

proptest! {
    #[test]
    fn nobody_waits_longer_than_the_bound((shape, each, ranks, trace) in trace()) {
        let bound = 4 * shape[1].div_ceil(each) as i64;
        for ranks in [None, Some(&ranks[..])] {
            let (_, longest) = run(&trace, shape, each, |ledger| ours(ledger, ranks));
            prop_assert!(longest < bound, "waited {longest}, bound {bound}");
        }
    }
}

/// Algorithm 1 as printed: from the last layer to the first, each takes its K experts with the most unsaved tokens whose
/// ranks have capacity left, ⌈layers · K / ranks⌉ each.
fn as_printed(ledger: &TokenLedger, ranks: &[i64]) -> Selection {
    let ([layers, experts], each) = (ledger.shape(), ledger.experts_per_layer());
    let names: BTreeSet<i64> = ranks.iter().copied().collect();
    let share = (layers * each).div_ceil(names.len());
    let mut left: BTreeMap<i64, usize> = names.into_iter().map(|rank| (rank, share)).collect();
    let mut rows = vec![Vec::new(); layers];
    for layer in (0..layers).rev() {
        let mut cells: Vec<usize> = (layer * experts..(layer + 1) * experts).collect();
        cells.sort_by_key(|&cell| (Reverse(ledger.at_risk()[cell]), cell));
        for cell in cells.into_iter().filter(|&cell| ledger.at_risk()[cell] > 0) {
            let room = left.get_mut(&ranks[cell]).unwrap();
            if rows[layer].len() < each && *room > 0 {
                *room -= 1;
                rows[layer].push(cell % experts);
            }
        }
        rows[layer].sort_unstable();
    }
    rows
}

/// 4 layers of 8 experts; one hot expert a layer, whose place moves, and 1 to 7 tokens for each of the others.
fn skewed(steps: i64) -> Vec<Vec<i64>> {
    let count = |step: i64, cell: i64| match cell % 8 == (step / 20 + cell / 8) % 8 {
        true => 500,
        false => 1 + (step * 5 + cell * 3) % 7,
    };
    (0..steps).map(|step| (0..32).map(|cell| count(step, cell)).collect()).collect()
}

#[test]
fn as_printed_starves_experts_and_ours_does_not() {
    let ranks: Vec<i64> = (0..32).map(|cell| cell % 8 / 2).collect();
    let (printed, printed_wait) = run(&skewed(100), [4, 8], 1, |ledger| as_printed(ledger, &ranks));
    let (mended, mended_wait) = run(&skewed(100), [4, 8], 1, |ledger| ours(ledger, Some(&ranks)));
    assert!(printed_wait > 2 * 32, "an expert is passed over for long: {printed_wait}");
    assert!(mended_wait < 32, "bound 4·⌈8/1⌉ = 32, got {mended_wait}");
    let at_risk = |ledger: &TokenLedger| ledger.plt_at_risk().iter().sum::<f64>();
    assert!(at_risk(&mended) < at_risk(&printed), "{} and {}", at_risk(&mended), at_risk(&printed));
}

#[test]
fn load_alone_starves_a_cold_expert_and_age_does_not() {
    // Expert 3 gets one token in the first step; the other three ten in every step.
    let trace: Vec<Vec<i64>> = (0..40).map(|step| vec![10, 10, 10, i64::from(step == 0)]).collect();
    let blind = |ledger: &TokenLedger| {
        load_aware(ledger.at_risk(), None, None, [1, 4], 1, ledger.checkpoint()).unwrap()
    };
    assert_eq!(run(&trace, [1, 4], 1, blind).1, 40);
    assert!(run(&trace, [1, 4], 1, |ledger| ours(ledger, None)).1 < 16);
}

/// A layer with one rank alone cannot starve an expert of another layer on that rank.
#[test]
fn a_rank_that_is_always_full_keeps_nobody_waiting_for_ever() {
    // Expert 0 of layer 0 and all of layer 1 are on rank 0; layer 1 needs that rank's share at each checkpoint.
    let trace: Vec<Vec<i64>> = (0..40).map(|step| vec![i64::from(step == 0), 9, 9, 9]).collect();
    let ranks = [0, 1, 0, 0];
    let (_, longest) = run(&trace, [2, 2], 1, |ledger| ours(ledger, Some(&ranks)));
    assert!(longest < 8, "bound 4·⌈2/1⌉ = 8, got {longest}");
}
