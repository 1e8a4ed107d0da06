//! The choice of copies, compared with all choices on small sizes, and properties for all inputs.

use evermoe::protection::{
    CopyKind, CopyNode, CopyPlan, CopyReason, CopyRequest, CopyUnit, Limit, choose_copies,
};
use evermoe::schedule::{Link, MemoryKind};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn node(domain: usize) -> CopyNode {
    CopyNode {
        failure: 1e-3,
        domain,
        host_bytes: 1 << 20,
        device_bytes: 0,
        network_seconds: 1.0,
        host_link_seconds: 1.0,
    }
}

fn unit(active: &[usize]) -> CopyUnit {
    CopyUnit { state_bytes: 120, gradient_bytes: 20, active: active.to_vec(), tokens: 10.0, replayable: true }
}

/// A byte takes a millisecond of the network and a tenth of it on the host link.
fn request<'a>(units: &'a [CopyUnit], nodes: &'a [CopyNode]) -> CopyRequest<'a> {
    CopyRequest {
        units,
        nodes,
        network: Link { alpha: 0.0, beta: 1e3 },
        host_link: Link { alpha: 0.0, beta: 1e4 },
        step_seconds: 2.0,
        copies: 2,
        budget: 0.01,
        max_period: 8,
        persist_period: 101,
        log_steps: 2,
    }
}

// ---- an oracle that knows nothing of the planner: one assignment, what it takes and what it loses

/// Kind, and holders with their memory.
type Assigned = (CopyKind, Vec<(usize, MemoryKind)>);

fn sent(unit: &CopyUnit, kind: CopyKind) -> u64 {
    match kind {
        CopyKind::Replayed => unit.gradient_bytes,
        CopyKind::Snapshot { period } => unit.state_bytes.div_ceil(period as u64),
        CopyKind::Active | CopyKind::Uncovered => 0,
    }
}

/// The largest share by which a node is over time or memory, and the seconds by which the slowest delays the step.
fn over(request: &CopyRequest<'_>, senders: &[usize], all: &[Assigned]) -> (bool, f64) {
    let time = |link: Link, bytes: u64| if bytes == 0 { 0.0 } else { link.alpha + bytes as f64 / link.beta };
    let mut delay = 0.0_f64;
    let mut fits = true;
    for (number, node) in request.nodes.iter().enumerate() {
        let (mut network, mut host_link, mut host, mut device) = (0.0, 0.0, 0, 0);
        for ((unit, &sender), (kind, holders)) in request.units.iter().zip(senders).zip(all) {
            let bytes = sent(unit, *kind);
            let memory = match kind {
                CopyKind::Replayed => unit.state_bytes + request.log_steps * unit.gradient_bytes,
                CopyKind::Snapshot { .. } => 2 * unit.state_bytes,
                _ => 0,
            };
            if sender == number && !holders.is_empty() {
                network += holders.len() as f64 * time(request.network, bytes);
                host_link += time(request.host_link, bytes);
            }
            for &(_, place) in holders.iter().filter(|(holder, _)| *holder == number) {
                network += time(request.network, bytes);
                match place {
                    MemoryKind::Host => host += memory,
                    MemoryKind::Device => {
                        host_link += time(request.host_link, bytes);
                        device += memory;
                    }
                }
            }
        }
        fits &= host <= node.host_bytes && device <= node.device_bytes;
        let late = (network - node.network_seconds).max(0.0) + (host_link - node.host_link_seconds).max(0.0);
        delay = delay.max(late);
    }
    (fits && delay <= request.budget * request.step_seconds + 1e-9, delay)
}

fn domains(request: &CopyRequest<'_>, nodes: impl IntoIterator<Item = usize>) -> BTreeSet<usize> {
    nodes.into_iter().map(|node| request.nodes[node].domain).collect()
}

fn fail(request: &CopyRequest<'_>, domains: &BTreeSet<usize>) -> f64 {
    let alive = |domain: usize| {
        let members = request.nodes.iter().filter(move |node| node.domain == domain);
        members.map(|node| 1.0 - node.failure).product::<f64>()
    };
    domains.iter().map(|&domain| 1.0 - alive(domain)).product()
}

/// Whether enough domains hold the current state of the unit, and its expected loss.
fn value(request: &CopyRequest<'_>, unit: &CopyUnit, (kind, holders): &Assigned) -> (bool, f64) {
    let active = domains(request, unit.active.iter().copied());
    let copied = domains(request, holders.iter().map(|&(node, _)| node));
    let stored = (request.persist_period - 1) as f64 / 2.0;
    let period = if let CopyKind::Snapshot { period } = kind { *period } else { 1 };
    let lag = ((period - 1) as f64 / 2.0).min(stored);
    let both = fail(request, &copied);
    let current = active.len() + if period == 1 { copied.difference(&active).count() } else { 0 };
    let loss = fail(request, &active) * (both * stored + (1.0 - both) * lag) * unit.tokens;
    (current >= request.copies, loss)
}

/// All that one unit may get, with at most `copies − 1` holders on different domains.
fn all_of(request: &CopyRequest<'_>, unit: &CopyUnit) -> Vec<Assigned> {
    let mut found = vec![(CopyKind::Uncovered, Vec::new())];
    let active = domains(request, unit.active.iter().copied());
    let periods = [1, 2, 3, 4, 6, 8, 12].into_iter();
    let snapshots = periods
        .filter(|&period| period <= request.max_period && (period == 1 || period < request.persist_period));
    let kinds: Vec<CopyKind> = snapshots
        .map(|period| CopyKind::Snapshot { period })
        .chain(unit.replayable.then_some(CopyKind::Replayed))
        .collect();
    let missing = request.copies.saturating_sub(active.len());
    for kind in kinds {
        let places: &[MemoryKind] = if kind == CopyKind::Replayed {
            &[MemoryKind::Host, MemoryKind::Device]
        } else {
            &[MemoryKind::Host]
        };
        let mut lists: Vec<Vec<(usize, MemoryKind)>> = vec![Vec::new()];
        for number in 0..request.nodes.len() {
            let more = lists.iter().filter(|list| list.len() < missing).flat_map(|list| {
                places.iter().map(move |&place| [list.as_slice(), &[(number, place)]].concat())
            });
            let more: Vec<_> = more.collect();
            lists.extend(more);
        }
        lists.retain(|list| {
            let on = domains(request, list.iter().map(|&(node, _)| node));
            !list.is_empty() && on.len() == list.len() && on.is_disjoint(&active)
        });
        found.extend(lists.into_iter().map(|list| (kind, list)));
    }
    found
}

/// Whether all units can be covered, and the least loss of all choices (of those that cover all, if there are any).
fn best(request: &CopyRequest<'_>, senders: &[usize]) -> (bool, f64) {
    let each: Vec<Vec<(Assigned, (bool, f64))>> = request
        .units
        .iter()
        .map(|unit| {
            let all = all_of(request, unit).into_iter();
            all.map(|assigned| (assigned.clone(), value(request, unit, &assigned))).collect()
        })
        .collect();
    let mut found = (false, f64::INFINITY);
    for number in 0..each.iter().map(Vec::len).product::<usize>() {
        let mut rest = number;
        let mut covered = true;
        let (mut all, mut loss) = (Vec::new(), 0.0);
        for choices in &each {
            let (assigned, (covers, lost)) = &choices[rest % choices.len()];
            rest /= choices.len();
            all.push(assigned.clone());
            covered &= covers;
            loss += lost;
        }
        let better = (covered && !found.0) || (covered == found.0 && loss < found.1);
        if better && over(request, senders, &all).0 {
            found = (covered, loss);
        }
    }
    found
}

/// What must hold for every plan; whether all units are covered.
fn check(request: &CopyRequest<'_>, plan: &CopyPlan) -> bool {
    let senders: Vec<usize> = plan.units.iter().map(|unit| unit.sender).collect();
    let all: Vec<Assigned> = plan
        .units
        .iter()
        .map(|unit| (unit.kind, unit.holders.iter().map(|holder| (holder.node, holder.memory)).collect()))
        .collect();
    let (fits, delay) = over(request, &senders, &all);
    assert!(fits, "over time or memory: {plan:?}");
    assert!((delay - plan.delay_seconds).abs() < 1e-9);
    let mut lost = 0.0;
    for ((unit, choice), assigned) in request.units.iter().zip(&plan.units).zip(&all) {
        assert!(unit.active.contains(&choice.sender));
        let active = domains(request, unit.active.iter().copied());
        let copied = domains(request, choice.holders.iter().map(|holder| holder.node));
        assert_eq!(copied.len(), choice.holders.len(), "two copies in one domain");
        assert!(copied.is_disjoint(&active), "a copy where the unit is active");
        let (covered, loss) = value(request, unit, assigned);
        assert_eq!(choice.covered, covered);
        assert_eq!(covered, !matches!(choice.reason, CopyReason::Limited(_)));
        assert!((choice.lost_tokens - loss).abs() <= 1e-12 + 1e-9 * loss);
        assert_eq!(choice.bytes, sent(unit, choice.kind) * choice.holders.len() as u64);
        lost += loss;
    }
    assert!((plan.lost_tokens - lost).abs() <= 1e-12 + 1e-9 * lost);
    let covered = plan.units.iter().all(|unit| unit.covered);
    for survival in plan.survival.iter().filter(|survival| survival.failures < request.copies) {
        assert_eq!(
            survival.without_loss.probability > 1.0 - 1e-9,
            covered || safe(request, plan, survival.failures)
        );
        assert!(survival.with_loss.probability >= survival.without_loss.probability - 1e-9);
    }
    assert_eq!(
        plan.summary.starts_with("every unit survives"),
        covered && request.copies > 1,
        "{}",
        plan.summary
    );
    covered
}

/// All units are on more domains than fail, though some on fewer than wanted.
fn safe(request: &CopyRequest<'_>, plan: &CopyPlan, failures: usize) -> bool {
    request.units.iter().zip(&plan.units).all(|(unit, choice)| {
        let copies = choice.holders.iter().filter(|_| choice.kind.period() == 1);
        let copied = copies.map(|holder| holder.node);
        domains(request, unit.active.iter().copied().chain(copied)).len() > failures
    })
}

/// Numbers from a small generator of its own.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % below
    }
}

#[test]
fn equal_units_get_the_best_of_all_choices() {
    let mut covered = 0;
    let mut cases = 0;
    for network in [0.0, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.3] {
        for (replayable, host_bytes) in [(true, 1000), (true, 320), (true, 160), (false, 1000), (false, 240)]
        {
            for device_bytes in [0, 160] {
                let one = CopyUnit { replayable, ..unit(&[0]) };
                let units = [
                    one.clone(),
                    CopyUnit { active: vec![1], ..one.clone() },
                    CopyUnit { active: vec![0, 0], ..one },
                ];
                let nodes = [0, 1, 2].map(|domain| CopyNode {
                    network_seconds: network,
                    host_bytes,
                    device_bytes,
                    ..node(domain)
                });
                let request = CopyRequest { max_period: 3, ..request(&units, &nodes) };
                let plan = choose_copies(&request).unwrap();
                let all = check(&request, &plan);
                let senders: Vec<usize> = plan.units.iter().map(|unit| unit.sender).collect();
                let (possible, least) = best(&request, &senders);
                assert_eq!(
                    all, possible,
                    "{network} {replayable} {host_bytes} {device_bytes}: {}",
                    plan.summary
                );
                assert!(
                    plan.lost_tokens <= least * 1.0001 + 1e-12,
                    "{} of {least}: {network} {replayable} {host_bytes} {device_bytes} {}",
                    plan.lost_tokens,
                    plan.summary
                );
                cases += 1;
                covered += usize::from(all);
            }
        }
    }
    assert!(covered > 9 && covered < cases - 9, "{covered} of {cases}");
}

#[test]
fn mixed_units_get_nearly_the_best() {
    let mut dice = Dice(7);
    let (mut missed, mut possible_cases, mut exact, mut gaps, mut worst) = (0, 0, 0, 0.0, 0.0_f64);
    const CASES: usize = 150;
    for case in 0..CASES {
        let units: Vec<CopyUnit> = (0..3)
            .map(|_| CopyUnit {
                state_bytes: 60 + 30 * dice.roll(5),
                gradient_bytes: 10 * dice.roll(5),
                active: vec![dice.roll(4) as usize],
                tokens: dice.roll(100) as f64,
                replayable: dice.roll(3) > 0,
            })
            .collect();
        let nodes: Vec<CopyNode> = (0..4)
            .map(|number| CopyNode {
                failure: 0.001 * (1 + dice.roll(5)) as f64,
                host_bytes: 100 * dice.roll(6),
                device_bytes: 100 * dice.roll(3),
                network_seconds: 0.02 * dice.roll(9) as f64,
                ..node(if case % 2 == 0 { number } else { number / 2 })
            })
            .collect();
        let request = CopyRequest { max_period: 4, ..request(&units, &nodes) };
        let plan = choose_copies(&request).unwrap();
        let all = check(&request, &plan);
        let senders: Vec<usize> = plan.units.iter().map(|unit| unit.sender).collect();
        let (possible, least) = best(&request, &senders);
        assert!(possible || !all);
        possible_cases += usize::from(possible);
        missed += usize::from(possible && !all);
        // Of what no copies at all would lose.
        let nothing: f64 =
            request.units.iter().map(|unit| value(&request, unit, &(CopyKind::Uncovered, vec![])).1).sum();
        let gap = (plan.lost_tokens - least).max(0.0) / nothing.max(1e-12);
        exact += usize::from(plan.lost_tokens <= least * 1.001);
        gaps += gap / CASES as f64;
        worst = worst.max(gap);
    }
    assert!(possible_cases > CASES / 10 && missed == 0, "missed {missed} of {possible_cases}");
    assert!(
        exact > CASES * 3 / 4 && gaps < 0.01 && worst < 0.35,
        "{exact} exact, mean gap {gaps}, worst {worst}"
    );
}

#[test]
fn what_is_short_is_named() {
    let units = [unit(&[0]), unit(&[0, 1]), CopyUnit { gradient_bytes: 0, ..unit(&[1]) }];
    let nodes = [node(0), node(1), node(2)];
    let reasons = |request: &CopyRequest<'_>| {
        let plan = choose_copies(request).unwrap();
        check(request, &plan);
        plan.units.iter().map(|unit| unit.reason).collect::<Vec<_>>()
    };
    let asked = request(&units, &nodes);
    let held = CopyReason::HeldActively { domains: 2 };
    assert_eq!(reasons(&asked), [CopyReason::GradientIsSmaller, held, CopyReason::Idle]);
    let domains = CopyReason::Limited(Limit::Domains);
    let four = CopyRequest { copies: 4, ..asked };
    assert_eq!(reasons(&four), [domains; 3]);
    let small = nodes.map(|node| CopyNode { host_bytes: 100, ..node });
    let memory = reasons(&CopyRequest { nodes: &small, ..asked })[0];
    assert!(matches!(memory, CopyReason::Limited(Limit::Memory { .. })), "{memory:?}");
    let slow = nodes.map(|node| CopyNode { network_seconds: 0.0, ..node });
    let no_time = CopyRequest { nodes: &slow, budget: 0.0, ..asked };
    assert!(matches!(reasons(&no_time)[0], CopyReason::Limited(Limit::Time { .. })));
    assert_eq!(reasons(&no_time)[2], CopyReason::Idle);
    let fixed: Vec<CopyUnit> =
        units.iter().map(|unit| CopyUnit { replayable: false, ..unit.clone() }).collect();
    assert_eq!(reasons(&CopyRequest { units: &fixed, ..asked })[0], CopyReason::NotReplayable);
    let large = [CopyUnit { gradient_bytes: 120, ..unit(&[0]) }];
    assert_eq!(reasons(&CopyRequest { units: &large, ..asked }), [CopyReason::StateIsSmaller]);
}

#[test]
fn errors_name_what_is_wrong() {
    let (units, nodes) = ([unit(&[0])], [node(0), node(1)]);
    let asked = request(&units, &nodes);
    let message = |request: &CopyRequest<'_>| choose_copies(request).unwrap_err().to_string();
    assert!(message(&CopyRequest { copies: 0, ..asked }).starts_with("copies: expected 1"));
    assert!(message(&CopyRequest { budget: f64::NAN, ..asked }).starts_with("budget"));
    assert!(message(&CopyRequest { step_seconds: 0.0, ..asked }).starts_with("step_seconds"));
    assert!(message(&CopyRequest { max_period: 0, ..asked }).starts_with("max_period"));
    assert!(message(&CopyRequest { persist_period: 0, ..asked }).starts_with("persist_period"));
    assert!(message(&CopyRequest { log_steps: u64::MAX, ..asked }).contains("2^64 bytes"));
    let wrong = [CopyUnit { active: vec![2], ..unit(&[0]) }];
    assert!(message(&CopyRequest { units: &wrong, ..asked }).contains("unit 0 is active on node 2"));
    let nowhere = [CopyUnit { active: vec![], ..unit(&[0]) }];
    assert!(message(&CopyRequest { units: &nowhere, ..asked }).contains("unit 0 is active nowhere"));
    let never = [node(0), CopyNode { failure: 1.5, ..node(1) }];
    assert!(message(&CopyRequest { nodes: &never, ..asked }).contains("failure of node 1"));
    assert!(choose_copies(&CopyRequest { units: &[], nodes: &[], ..asked }).unwrap().units.is_empty());
}

proptest! {
    #[test]
    fn every_plan_keeps_to_time_memory_and_domains(
        sizes in prop::collection::vec((0..400_u64, 0..60_u64, prop::collection::vec(0..9_usize, 1..3), 0..50_u32, any::<bool>()), 0..14),
        machines in prop::collection::vec((0..6_usize, 0..2000_u64, 0..900_u64, 0..40_u32, 0..9_u32), 1..9),
        copies in 1..5_usize, budget in 0..9_u32, max_period in 1..20_usize, persist_period in 1..30_usize, alpha in 0..3_u32,
    ) {
        let units: Vec<CopyUnit> = sizes
            .into_iter()
            .map(|(state_bytes, gradient_bytes, active, tokens, replayable)| CopyUnit {
                state_bytes,
                gradient_bytes,
                active: active.into_iter().map(|node| node % machines.len()).collect(),
                tokens: f64::from(tokens),
                replayable,
            })
            .collect();
        let nodes: Vec<CopyNode> = machines
            .into_iter()
            .map(|(domain, host_bytes, device_bytes, network, failure)| CopyNode {
                failure: f64::from(failure) / 1000.0,
                domain,
                host_bytes,
                device_bytes,
                network_seconds: f64::from(network) / 20.0,
                host_link_seconds: 0.1,
            })
            .collect();
        let asked = CopyRequest {
            copies, max_period, persist_period, budget: f64::from(budget) / 100.0,
            network: Link { alpha: f64::from(alpha) / 1000.0, beta: 1e3 }, ..request(&units, &nodes)
        };
        let plan = choose_copies(&asked).unwrap();
        check(&asked, &plan);
        prop_assert_eq!(plan, choose_copies(&asked).unwrap());
    }
}
