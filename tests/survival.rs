//! Survival compared with enumeration on small families, with closed forms on large ones, and between all three
//! methods.

use evermoe::placement::{Survival, recovery_probability, survival};
use proptest::prelude::*;

/// The probability by trying every choice of failed nodes.
fn enumerate(nodes: usize, holders: &[Vec<usize>], failures: usize) -> f64 {
    let masks: Vec<u32> =
        holders.iter().map(|set| set.iter().fold(0, |mask, node| mask | 1 << node)).collect();
    let choices = (0..1_u32 << nodes).filter(|failed| failed.count_ones() as usize == failures);
    let (mut all, mut survived) = (0_u32, 0_u32);
    for failed in choices {
        all += 1;
        survived += u32::from(masks.iter().all(|mask| mask & failed != *mask));
    }
    f64::from(survived) / f64::from(all)
}

fn exact(nodes: usize, holders: &[Vec<usize>], failures: usize) -> f64 {
    let found = survival(nodes, holders, failures, None, 0).unwrap();
    assert_eq!((found.error, found.samples), (0.0, None), "{nodes} nodes, {failures} failures");
    found.probability
}

fn assert_near(found: f64, expected: f64, what: &str) {
    assert!((found - expected).abs() < 1e-12, "{what}: {found}, expected {expected}");
}

/// C(n, k) / C(m, k) for n ≤ m.
fn choose_ratio(n: usize, m: usize, k: usize) -> f64 {
    (0..k).map(|i| n.saturating_sub(i) as f64 / (m - i) as f64).product()
}

fn choose(n: usize, k: usize) -> f64 {
    if k > n { 0.0 } else { (0..k).map(|i| (n - i) as f64 / (i + 1) as f64).product() }
}

/// Gemini's closed form: groups of k of N nodes.
fn groups(nodes: usize, copies: usize, failures: usize) -> f64 {
    let terms = (0..=failures / copies).map(|lost| {
        let sign = if lost % 2 == 0 { 1.0 } else { -1.0 };
        sign * choose(nodes / copies, lost) * choose(nodes - lost * copies, failures - lost * copies)
    });
    terms.sum::<f64>() / choose(nodes, failures)
}

fn ring(nodes: usize, copies: usize) -> Vec<Vec<usize>> {
    (0..nodes).map(|first| (0..copies).map(|step| (first + step) % nodes).collect()).collect()
}

/// The probability that no `copies` failed nodes of a ring are neighbours: runs of failed nodes between living ones.
///
/// Of `alive` living nodes each is followed by a run of 0 to `copies − 1` failed ones; rotating such a sequence to the
/// N places and dividing by the living node it begins with gives N/alive × the coefficient of x^failures.
fn ring_closed_form(nodes: usize, copies: usize, failures: usize) -> f64 {
    let alive = nodes - failures;
    // Σ_j (−1)^j C(alive, j) C(failures − j·copies + alive − 1, alive − 1), relative to C(N, failures)
    let mut sum = 0.0;
    for full in 0..=failures / copies {
        let sign = if full % 2 == 0 { 1.0 } else { -1.0 };
        sum += sign
            * choose(alive, full)
            * choose(failures - full * copies + alive - 1, failures - full * copies);
    }
    sum * nodes as f64 / alive as f64 / choose(nodes, failures)
}

/// Sets from a stream of numbers, so that a plain loop can try thousands of families.
fn random_sets(state: &mut u64, nodes: usize, count: usize, largest: usize) -> Vec<Vec<usize>> {
    let mut draw = |bound: usize| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) as usize % bound
    };
    (0..count).map(|_| (0..1 + draw(largest)).map(|_| draw(nodes)).collect()).collect()
}

#[test]
fn every_random_family_of_few_nodes_matches_enumeration() {
    let mut state = 1;
    for case in 0..3000 {
        let nodes = 1 + case % 11;
        let holders = random_sets(&mut state, nodes, 1 + case / 11 % 9, 1 + case % 5);
        for failures in 0..=nodes {
            let expected = enumerate(nodes, &holders, failures);
            assert_near(exact(nodes, &holders, failures), expected, &format!("{holders:?} F={failures}"));
        }
    }
}

#[test]
fn few_failures_and_many_failures_of_a_dense_family_match_enumeration() {
    let mut state = 7;
    for case in 0..12 {
        let holders = random_sets(&mut state, 20, 30 + 10 * (case % 3), 4);
        let holders: Vec<_> = holders.into_iter().filter(|set| set.len() > 1 && set[0] != set[1]).collect();
        for failures in [1, 2, 3, 5, 8, 13] {
            assert_near(exact(20, &holders, failures), enumerate(20, &holders, failures), "dense");
        }
    }
}

#[test]
fn groups_match_the_closed_form() {
    for (nodes, copies) in [(16, 2), (12, 3), (24, 2), (60, 3), (48, 4), (1000, 2), (9999, 3)] {
        let holders: Vec<Vec<usize>> = (0..nodes / copies)
            .map(|group| (0..copies).map(|step| group * copies + step).collect())
            .collect();
        for failures in (1..=8.min(nodes)).chain([20].into_iter().filter(|_| nodes >= 60)) {
            let found = exact(nodes, &holders, failures);
            assert!((found - groups(nodes, copies, failures)).abs() < 1e-10, "{nodes} {copies} {failures}");
        }
    }
    assert_near(groups(16, 2, 2), 1.0 - 8.0 / 120.0, "the paper's 93.3 %");
}

#[test]
fn ten_thousand_nodes_in_pairs_survive_any_number_of_failures() {
    let holders: Vec<Vec<usize>> = (0..5000).map(|pair| vec![2 * pair, 2 * pair + 1]).collect();
    for failures in [1, 2, 10, 100, 300, 1000, 4999, 5000, 5001] {
        // the i-th failure must not hit the partner of an earlier one
        let expected: f64 =
            (0..failures).map(|i| 10_000_usize.saturating_sub(2 * i) as f64 / (10_000 - i) as f64).product();
        assert_near(exact(10_000, &holders, failures), expected, &format!("{failures} failures"));
    }
}

#[test]
fn small_rings_match_enumeration_and_the_closed_form() {
    for nodes in 2..16 {
        for copies in 2..=4.min(nodes) {
            for failures in 0..nodes {
                let expected = enumerate(nodes, &ring(nodes, copies), failures);
                assert_near(exact(nodes, &ring(nodes, copies), failures), expected, "ring");
                assert_near(ring_closed_form(nodes, copies, failures), expected, "closed form");
            }
        }
    }
}

#[test]
fn large_rings_match_the_closed_form() {
    for nodes in [500, 10_000] {
        for copies in 2..=4 {
            for failures in [2, 3, 4, 5, 8, 12] {
                let expected = ring_closed_form(nodes, copies, failures);
                let found = exact(nodes, &ring(nodes, copies), failures);
                assert!((found - expected).abs() < 1e-10, "{nodes} {copies} {failures}: {found} {expected}");
            }
        }
        for failures in [50, 100, 200, 249] {
            // N/(N−f) · C(N−f, f) / C(N, f)
            let expected =
                nodes as f64 / (nodes - failures) as f64 * choose_ratio(nodes - failures, nodes, failures);
            assert_near(exact(nodes, &ring(nodes, 2), failures), expected, &format!("{nodes} {failures}"));
        }
    }
}

#[test]
fn a_dense_graph_too_large_to_enumerate_matches_inclusion_and_exclusion() {
    // 256 nodes, about 500 random pairs: for F = 2 every distinct pair is one lost choice.
    let mut state = 3;
    let mut pairs: Vec<Vec<usize>> = random_sets(&mut state, 256, 1200, 2);
    pairs.iter_mut().for_each(|set| set.sort_unstable());
    pairs.retain(|set| set.len() == 2 && set[0] != set[1]);
    pairs.sort();
    pairs.dedup();
    assert_near(exact(256, &pairs, 2), 1.0 - pairs.len() as f64 / (256.0 * 255.0 / 2.0), "pairs");
    // For F = 3: pairs with any third node, less the triples counted twice (paths) or thrice (triangles).
    let joined = |a: usize, b: usize| pairs.binary_search(&vec![a.min(b), a.max(b)]).is_ok();
    let mut lost = 0_u32;
    for a in 0..256 {
        for b in a + 1..256 {
            lost += (b + 1..256).filter(|&c| joined(a, b) || joined(a, c) || joined(b, c)).count() as u32;
        }
    }
    assert_near(exact(256, &pairs, 3), 1.0 - f64::from(lost) / choose(256, 3), "triples");
}

#[test]
fn a_family_that_is_too_much_work_is_sampled() {
    let mut state = 5;
    let holders: Vec<Vec<usize>> =
        random_sets(&mut state, 2000, 6000, 3).into_iter().filter(|set| set.len() > 2).collect();
    let found = survival(2000, &holders, 40, None, 0).unwrap();
    assert_eq!(found.samples, Some(100_000));
    assert!(found.error > 0.006 && found.error < 0.007, "{found:?}");
}

#[test]
fn a_pair_graph_that_is_too_large_for_bit_sets_is_sampled_not_allocated() {
    // one node in pairs with all others: it must be alive, or be the only one that fails
    let star: Vec<Vec<usize>> = (1..200_000).map(|node| vec![0, node]).collect();
    let found = survival(200_000, &star, 2, None, 0).unwrap();
    assert_eq!(found.samples, Some(100_000));
    assert!((found.probability - (1.0 - 2.0 / 200_000.0)).abs() < found.error);
}

#[test]
fn samples_agree_with_the_exact_result_and_depend_on_the_seed_alone() {
    let holders = ring(40, 3);
    let sampled = |seed| survival(40, &holders, 9, Some(20_000), seed).unwrap();
    let truth = exact(40, &holders, 9);
    for seed in 0..20 {
        let found = sampled(seed);
        assert!((found.probability - truth).abs() < found.error, "{found:?} is not {truth}");
        assert_eq!(found, sampled(seed));
    }
    assert_ne!(sampled(1), sampled(2));
    assert_eq!(sampled(1).error, (2000_f64.ln() / 40_000.0).sqrt());
}

#[test]
fn ends_of_the_range() {
    let one = |probability| Survival { probability, error: 0.0, samples: None };
    assert_eq!(survival(3, &[], 3, None, 0).unwrap(), one(1.0));
    assert_eq!(survival(3, &[vec![0, 1, 2]], 3, None, 0).unwrap(), one(0.0));
    assert_eq!(survival(3, &[vec![0, 1, 2]], 2, None, 0).unwrap(), one(1.0));
    assert_eq!(survival(3, &[vec![0]], 0, None, 0).unwrap(), one(1.0));
    assert_eq!(survival(3, &[vec![]], 0, None, 0).unwrap(), one(0.0));
    assert_eq!(survival(0, &[], 0, None, 0).unwrap(), one(1.0));
    let (n, f) = (2.0_f64.powi(20), 2.0_f64.powi(19));
    let expected = (n - f) / n * (1.0 - f * (f - 1.0) / ((n - 1.0) * (n - 2.0)));
    assert_near(exact(1 << 20, &[vec![5], vec![7, 9]], 1 << 19), expected, "2^20 nodes");
}

#[test]
fn recovery_probability_counts_domains() {
    // 4 nodes, experts on {0, 1} and {2, 3}
    let matrix = [1, 0, 2, 0, 0, 1, 0, 1];
    let found = |failures, domains: Option<&[Vec<usize>]>| {
        recovery_probability(&matrix, 4, 2, failures, domains, None, 0).unwrap().probability
    };
    assert_near(found(2, None), 4.0 / 6.0, "nodes");
    assert_near(found(1, Some(&[vec![1, 2]])), 1.0, "one domain holds a replica of each");
    assert_near(found(2, Some(&[vec![1, 2]])), 1.0 / 3.0, "only the pair 0, 3 is survived");
    assert_near(found(1, Some(&[vec![0, 1], vec![2, 3]])), 0.0, "each domain holds an expert");
    assert_eq!(recovery_probability(&[], 4, 0, 4, None, None, 0).unwrap().probability, 1.0);
    assert_eq!(recovery_probability(&[1, 0], 1, 2, 0, None, None, 0).unwrap().probability, 0.0);
}

#[test]
fn errors_name_the_argument() {
    let message = |nodes, holders: &[Vec<usize>], failures, samples| {
        survival(nodes, holders, failures, samples, 0).unwrap_err().to_string()
    };
    assert!(message(2, &[], 3, None).starts_with("failures: expected 0 to 2"));
    assert!(message(usize::MAX, &[], 3, None).starts_with("nodes: expected at most 2^20"));
    assert!(message(2, &[vec![0], vec![2]], 1, None).starts_with("holders: set 1 names node 2; there are 2"));
    assert!(message(2, &[], 1, Some(0)).starts_with("samples: expected 1 to 2^32, got 0"));
    assert!(message(2, &[], 1, Some(u64::MAX)).starts_with("samples"));
    let message = |matrix: &[i64], nodes, failures, domains: &[Vec<usize>]| {
        recovery_probability(matrix, nodes, 2, failures, Some(domains), None, 0).unwrap_err().to_string()
    };
    assert!(message(&[1; 3], 2, 1, &[]).starts_with("matrix: expected 2 nodes × 2 experts, got 3"));
    assert!(message(&[1; 3], usize::MAX, 1, &[]).starts_with("matrix"));
    assert!(message(&[1, 1, -1, 1], 2, 1, &[]).starts_with("matrix: expert 0 has -1 replicas on node 1"));
    assert!(message(&[1; 4], 2, 2, &[vec![0, 1]]).starts_with("failures: expected 0 to 1"));
    assert!(message(&[1; 4], 2, 1, &[vec![2]]).starts_with("domains"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn one_failure_more_or_one_holder_less_is_never_safer(
        nodes in 2_usize..40, seed in 0_u64..1 << 40, count in 1_usize..40, failures in 1_usize..8,
    ) {
        let failures = failures.min(nodes);
        let holders = random_sets(&mut seed.clone(), nodes, count, 4);
        let found = exact(nodes, &holders, failures);
        prop_assert!((0.0..=1.0).contains(&found));
        prop_assert!(found <= exact(nodes, &holders, failures - 1) + 1e-12);
        let mut fewer = holders.clone();
        fewer[0].pop();
        prop_assert!(exact(nodes, &fewer, failures) <= found + 1e-12);
        let renamed: Vec<Vec<usize>> =
            holders.iter().map(|set| set.iter().map(|node| (node * 7 + 3) % nodes).collect()).collect();
        if nodes % 7 != 0 {
            prop_assert!((exact(nodes, &renamed, failures) - found).abs() < 1e-12);
        }
    }
}
