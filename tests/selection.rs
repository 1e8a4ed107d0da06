//! Selection of experts, the ledger of tokens, sharding: properties for all inputs, and exhaustive tests of small
//! sizes.

use super::common::all;
use evermoe::selection::{
    ModuleShard, Selection, TokenLedger, budget, place_owners, sequential, shard_modules,
};
use proptest::prelude::*;

fn size(selection: &Selection) -> usize {
    selection.iter().map(Vec::len).sum()
}

fn check_choice(selection: &Selection, tokens: &[i64], [layers, experts]: [usize; 2], capacity: usize) {
    let dirty = tokens.iter().filter(|&&count| count > 0).count();
    assert_eq!(selection.len(), layers);
    assert_eq!(size(selection), capacity.min(dirty), "{selection:?} of {tokens:?}");
    for (layer, chosen) in selection.iter().enumerate() {
        assert!(chosen.is_sorted_by(|a, b| a < b), "layer {layer}: {chosen:?}");
        assert!(
            chosen.iter().all(|&expert| tokens[layer * experts + expert] > 0),
            "layer {layer}: {chosen:?}"
        );
    }
}

/// The `count` experts with the most tokens, by trying one after the other.
fn heaviest(tokens: &[i64], count: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::new();
    for _ in 0..count {
        let rest = (0..tokens.len()).filter(|expert| !chosen.contains(expert));
        // The last of several largest, so reversed for the first.
        chosen.extend(rest.rev().max_by_key(|&expert| tokens[expert]));
    }
    chosen.sort_unstable();
    chosen
}

// ---- sequential ----

proptest! {
    #[test]
    fn sequential_is_the_formula_and_copies_everything_in_time(
        layers in 1_usize..5, experts in 1_usize..20, each in 1_usize..24, first in 0_u64..1000,
    ) {
        let within = experts.div_ceil(each) as u64;
        let mut copied = vec![vec![false; experts]; layers];
        for checkpoint in first..first + within {
            let chosen = sequential(layers, experts, each, checkpoint).unwrap();
            prop_assert_eq!(chosen.len(), layers);
            for (layer, chosen) in chosen.iter().enumerate() {
                let mut formula: Vec<usize> = (0..each.min(experts))
                    .map(|i| (layer * each.min(experts) + checkpoint as usize * each.min(experts) + i) % experts)
                    .collect();
                formula.sort_unstable();
                prop_assert_eq!(chosen, &formula);
                chosen.iter().for_each(|&expert| copied[layer][expert] = true);
            }
        }
        prop_assert!(copied.iter().flatten().all(|&done| done), "{:?} after {} checkpoints", copied, within);
    }
}

#[test]
fn sequential_takes_numbers_of_any_size() {
    assert_eq!(sequential(1, 3, usize::MAX, u64::MAX).unwrap(), [[0, 1, 2]]);
    assert_eq!(sequential(1, 10, 1, u64::MAX).unwrap(), [[5]]);
    assert!(sequential(usize::MAX, 2, 1, 0).unwrap_err().to_string().contains("more than 2^24"));
    assert!(sequential(0, 2, 1, 0).unwrap_err().to_string().contains("got 0 layers"));
    assert!(sequential(2, 2, 0, 0).unwrap_err().to_string().starts_with("experts_per_layer"));
}

// ---- budget ----

/// Experts of each layer in integers: a layer whose share reaches its room is full; then floors and remainders.
fn quotas(risk: &[i64], room: &[usize], capacity: usize) -> Vec<usize> {
    let mut quotas = vec![0; risk.len()];
    let mut open: Vec<usize> = (0..risk.len()).filter(|&layer| room[layer] > 0).collect();
    let mut left = capacity.min(room.iter().sum()) as i64;
    loop {
        let total: i64 = open.iter().map(|&layer| risk[layer]).sum();
        let Some(full) = open.iter().position(|&layer| left * risk[layer] >= room[layer] as i64 * total)
        else {
            open.iter().for_each(|&layer| quotas[layer] = (left * risk[layer] / total) as usize);
            let mut odd = left - open.iter().map(|&layer| left * risk[layer] / total).sum::<i64>();
            open.sort_by_key(|&layer| (std::cmp::Reverse(left * risk[layer] % total), layer));
            for &layer in &open {
                quotas[layer] += usize::from(odd > 0);
                odd = odd.saturating_sub(1);
            }
            return quotas;
        };
        let layer = open.remove(full);
        quotas[layer] = room[layer];
        left -= room[layer] as i64;
    }
}

fn check_budget(tokens: &[i64], shape: [usize; 2], capacity: usize) {
    let rows: Vec<&[i64]> = tokens.chunks(shape[1]).collect();
    let chosen = budget(tokens, shape, capacity as u64).unwrap();
    check_choice(&chosen, tokens, shape, capacity);
    let risk: Vec<i64> = rows.iter().map(|row| row.iter().sum()).collect();
    let room: Vec<usize> = rows.iter().map(|row| row.iter().filter(|&&count| count > 0).count()).collect();
    for ((row, chosen), quota) in rows.iter().zip(&chosen).zip(quotas(&risk, &room, capacity)) {
        assert_eq!(chosen, &heaviest(row, quota), "{capacity} of {tokens:?}");
    }
}

#[test]
fn budget_is_the_rule_in_whole_numbers_on_all_small_sizes() {
    for shape in [[1, 4], [2, 3], [3, 2]] {
        for tokens in all(shape[0] * shape[1], 3) {
            (0..8).for_each(|capacity| check_budget(&tokens, shape, capacity));
        }
    }
}

proptest! {
    #[test]
    fn budget_is_the_rule_in_whole_numbers(
        tokens in prop::collection::vec(prop_oneof![Just(0), 1_i64..9, 100_i64..3000], 24), capacity in 0_usize..30,
    ) {
        [[2, 12], [4, 6], [8, 3]].into_iter().for_each(|shape| check_budget(&tokens, shape, capacity));
    }

    #[test]
    fn counts_may_be_of_any_size(
        tokens in prop::collection::vec(prop_oneof![Just(0), Just(i64::MAX), 1..i64::MAX], 24),
        capacity in 0_usize..30,
    ) {
        check_choice(&budget(&tokens, [4, 6], capacity as u64).unwrap(), &tokens, [4, 6], capacity);
    }
}

// ---- ledger ----

#[derive(Clone, Debug)]
enum Event {
    Step(Vec<i64>),
    Copied(Vec<usize>),
    Lost(Vec<usize>),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let experts = || prop::collection::vec(0_usize..6, 0..5);
    let event = prop_oneof![
        prop::collection::vec(0_i64..50, 6).prop_map(Event::Step),
        experts().prop_map(Event::Copied),
        experts().prop_map(Event::Lost),
    ];
    prop::collection::vec(event, 0..40)
}

/// The experts of a list of cells of 2 layers of 3.
fn lists(cells: &[usize]) -> Vec<Vec<usize>> {
    (0..2)
        .map(|layer| cells.iter().filter(|&&cell| cell / 3 == layer).map(|cell| cell % 3).collect())
        .collect()
}

/// The last event that reset a cell, or 0; the ledger's counts follow from the events alone.
fn reset(events: &[Event], cell: usize) -> usize {
    let resets =
        |event: &Event| matches!(event, Event::Copied(cells) | Event::Lost(cells) if cells.contains(&cell));
    events.iter().rposition(resets).map_or(0, |last| last + 1)
}

fn tokens(events: &[Event], cell: usize) -> i64 {
    events.iter().map(|event| if let Event::Step(counts) = event { counts[cell] } else { 0 }).sum()
}

proptest! {
    #[test]
    fn the_ledger_is_what_the_events_say(events in events()) {
        let mut ledger = TokenLedger::new(2, 3, 1, 0.01).unwrap();
        let (mut lost, mut doubled) = ([0; 6], 1);
        for (position, event) in events.iter().enumerate() {
            match event {
                Event::Step(counts) => ledger.add(counts).unwrap(),
                Event::Copied(cells) => ledger.copied(&lists(cells)).unwrap(),
                Event::Lost(cells) => {
                    let before = &events[..position];
                    let at_risk = |cell: usize| tokens(&before[reset(before, cell)..], cell);
                    let now = std::array::from_fn(|cell| if cells.contains(&cell) { at_risk(cell) } else { 0 });
                    lost.iter_mut().zip(now).for_each(|(lost, now)| *lost += now);
                    let plt = ledger.lose(&lists(cells), None).unwrap();
                    prop_assert!((plt - portion(before, &now)).abs() < 1e-12, "{} {:?}", plt, now);
                    doubled *= 1 + usize::from(now.iter().any(|&now| now > 0) && portion(before, &lost) > 0.01);
                }
            }
            prop_assert_eq!(ledger.experts_per_layer(), doubled.min(3));
        }
        prop_assert!((ledger.plt() - portion(&events, &lost)).abs() < 1e-12);
        for cell in 0..6 {
            let since = &events[reset(&events, cell)..];
            prop_assert_eq!(ledger.seen()[cell], tokens(&events, cell));
            prop_assert_eq!(ledger.at_risk()[cell], tokens(since, cell));
            prop_assert_eq!(ledger.lost()[cell], lost[cell]);
            let passed_over = |&position: &usize| {
                matches!(since[position], Event::Copied(_)) && tokens(&since[..position], cell) > 0
            };
            prop_assert_eq!(ledger.waiting()[cell], (0..since.len()).filter(passed_over).count() as i64);
        }
        let steps = events.iter().filter(|event| matches!(event, Event::Step(_))).count();
        let checkpoints = events.iter().filter(|event| matches!(event, Event::Copied(_))).count();
        prop_assert_eq!((ledger.step(), ledger.checkpoint()), (steps as u64, checkpoints as u64));
        prop_assert_eq!(TokenLedger::from_json(&ledger.to_json()).unwrap(), ledger);
    }

    #[test]
    fn the_limit_comes_back_to_the_last_bit(limit in 0.0..1.0) {
        let ledger = TokenLedger::new(1, 1, 1, limit).unwrap();
        prop_assert_eq!(TokenLedger::from_json(&ledger.to_json()).unwrap(), ledger);
    }

    #[test]
    fn text_that_is_no_ledger_is_an_error_and_no_panic(text in "\\PC*", cut in 0_usize..200) {
        prop_assert!(TokenLedger::from_json(&text).is_err());
        let text = TokenLedger::new(2, 3, 1, 0.01).unwrap().to_json();
        prop_assert!(TokenLedger::from_json(&text[..cut.min(text.len() - 1)]).is_err());
    }
}

/// PLT of 2 layers of 3: lost by seen, averaged.
fn portion(events: &[Event], lost: &[i64; 6]) -> f64 {
    let layer = |layer: usize| {
        let row = layer * 3..layer * 3 + 3;
        let seen: i64 = row.clone().map(|cell| tokens(events, cell)).sum();
        row.map(|cell| lost[cell]).sum::<i64>() as f64 / seen.max(1) as f64
    };
    (layer(0) + layer(1)) / 2.0
}

// ---- sharding ----

fn loads(parts: &[Vec<ModuleShard>], expert_bytes: &[u64]) -> Vec<u64> {
    let of = |part: &ModuleShard| part.bytes.end - part.bytes.start;
    parts.iter().zip(expert_bytes).map(|(parts, load)| load + parts.iter().map(of).sum::<u64>()).collect()
}

fn check_parts(parts: &[Vec<ModuleShard>], bytes: &[u64], alignment: u64) {
    let all: Vec<&ModuleShard> = parts.iter().flatten().collect();
    let mut next = bytes.iter().enumerate().filter(|(_, size)| **size > 0);
    let mut at: Option<(usize, u64)> = None;
    for part in &all {
        let (module, start) = at.unwrap_or_else(|| (next.next().unwrap().0, 0));
        assert_eq!((part.module, part.bytes.start), (module, start), "{all:?}");
        assert!(part.bytes.end > start && start % alignment == 0, "{all:?}");
        at = (part.bytes.end < bytes[module]).then_some((module, part.bytes.end));
    }
    assert!(at.is_none() && next.next().is_none(), "{all:?} do not cover {bytes:?}");
    let modules = bytes.iter().filter(|&&size| size > 0).count();
    assert!(all.len() < modules + parts.len(), "more than {} cuts: {all:?}", parts.len() - 1);
}

/// The load of the busiest rank under the best assignment of uncut modules, by trying all.
fn best_uncut(bytes: &[u64], loads: &mut [u64]) -> u64 {
    let Some((&first, rest)) = bytes.split_first() else { return *loads.iter().max().unwrap() };
    let mut best = u64::MAX;
    for rank in 0..loads.len() {
        loads[rank] += first;
        best = best.min(best_uncut(rest, loads));
        loads[rank] -= first;
    }
    best
}

#[test]
fn no_whole_assignment_beats_the_cut_one_on_all_small_sizes() {
    for bytes in all(4, 5).iter().map(|bytes| bytes.iter().map(|&size| size as u64).collect::<Vec<_>>()) {
        for expert_bytes in [vec![0, 0, 0], vec![0, 0, 7], vec![1, 4, 2], vec![9]] {
            let parts = shard_modules(&bytes, &expert_bytes, 1).unwrap();
            check_parts(&parts, &bytes, 1);
            let busiest = *loads(&parts, &expert_bytes).iter().max().unwrap();
            let best = best_uncut(&bytes, &mut expert_bytes.clone());
            assert!(busiest <= best, "{busiest} > {best}: {parts:?} of {bytes:?} on {expert_bytes:?}");
            // No cutting can be better than the mean, or than the busiest rank before.
            let ranks = expert_bytes.len() as u64;
            let all: u64 = bytes.iter().chain(&expert_bytes).sum();
            let before = *expert_bytes.iter().max().unwrap();
            assert_eq!(busiest, before.max(all.div_ceil(ranks)), "{bytes:?} on {expert_bytes:?}");
        }
    }
}

proptest! {
    #[test]
    fn all_bytes_are_saved_once_and_evenly(
        bytes in prop::collection::vec(prop_oneof![Just(0_u64), 1_u64..300, 1000_u64..90_000], 0..30),
        expert_bytes in prop::collection::vec(prop_oneof![Just(0_u64), 1_u64..60_000], 1..12),
        alignment in 1_u64..200,
    ) {
        let parts = shard_modules(&bytes, &expert_bytes, alignment).unwrap();
        check_parts(&parts, &bytes, alignment);
        let total: u64 = bytes.iter().sum();
        let room = |level: u64| expert_bytes.iter().map(|&load| level.saturating_sub(load)).sum::<u64>();
        for (parts, load) in parts.iter().zip(loads(&parts, &expert_bytes)) {
            // At a level one alignment lower, a rank that saves a part would have no room, or not all bytes would fit.
            prop_assert!(parts.is_empty() || room(load.saturating_sub(alignment)) < total, "{} of {:?}", load, parts);
        }
    }
}

#[test]
fn an_error_names_the_expert() {
    let mut ledger = TokenLedger::new(3, 4, 1, 1.0).unwrap();
    let mut counts = [0; 12];
    counts[6] = 5;
    ledger.add(&counts).unwrap();
    let newer = counts.map(|count| count + 1);
    let refused = ledger.copied_without(&[vec![], vec![2], vec![]], &newer).unwrap_err().to_string();
    assert!(refused.contains("layer 1 expert 2 has 6; expected 0 to 5"), "{refused}");
    let refused = ledger.lose(&[vec![], vec![2], vec![]], Some(&newer)).unwrap_err().to_string();
    assert!(refused.contains("layer 1 expert 2 has 6; expected 0 to 5"), "{refused}");
    counts[6] = i64::MAX;
    let refused = ledger.add(&counts).unwrap_err().to_string();
    assert!(refused.contains("layer 1 expert 2 has 9223372036854775807 tokens after 5"), "{refused}");
    counts[6] = -1;
    let refused = ledger.add(&counts).unwrap_err().to_string();
    assert!(refused.contains("layer 1 expert 2 has -1 tokens"), "{refused}");
}

#[test]
fn units_stay_with_their_owners_up_to_a_tenth_above_the_level() {
    let none = || vec![vec![]; 3];
    for (bytes, active, copies, loads, wanted) in [
        // Level 20: 22 bytes have room on rank 1, nothing else next to them.
        ([22, 18, 20], [1, 1, 1], none(), [0, 0, 0], [1, 2, 0]),
        ([23, 18, 19], [1, 1, 1], none(), [0, 0, 0], [0, 2, 1]),
        // A rank with a copy, before the one with the fewest bytes.
        ([20, 20, 20], [0, 0, 0], vec![vec![], vec![2], vec![1, 2]], [0, 0, 0], [0, 2, 1]),
        // Experts count, too: level 30.
        ([10, 20, 20], [0, 0, 1], none(), [25, 10, 5], [0, 2, 1]),
    ] {
        let active = active.map(|rank| vec![rank]);
        let found = place_owners(&bytes, &active, &copies, &loads).unwrap();
        assert_eq!(found, wanted, "{bytes:?} {copies:?} {loads:?}");
    }
    assert!(place_owners(&[1], &[vec![2]], &[vec![]], &[0, 0]).is_err(), "there is no rank 2");
    assert!(place_owners(&[1], &[vec![0]], &[], &[0, 0]).is_err());
}
