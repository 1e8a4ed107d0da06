//! What each preset does to a step, as a table: every decision of the engine that this table does not hold is in doubt.
//!
//! Three nodes. Four experts of 100 bytes, whose gradients have 10; node 0 trains experts 0 and 1, node 1 expert 2, node 2
//! expert 3. Two modules of 60 and 30 bytes, whose gradients have 6 and 3: replicated on all nodes, or sharded, the first on
//! node 0 and the second on node 1.

mod copies;
mod if_lost;
mod plans;
mod selection;

use evermoe::engine::{Engine, Members, Network, Options, Pace, Planned, Units};
use evermoe::protection::{PresetName, RankInfo, UnitInfo};
use evermoe::protocol::{step_of, version_of};
use evermoe::schedule::Link;
use std::fmt::Write;

const EXPERTS: usize = 4;
const COUNTS: [i64; EXPERTS] = [40, 30, 20, 10];

fn options(name: PresetName) -> Options {
    Options {
        preset: name.preset(),
        replication: 2,
        copy_budget: 0.01,
        snapshot_interval: None,
        experts_per_save: None,
        save_interval: 2,
        max_lost_token_fraction: 1.0,
        remote_bytes_per_step: Some(250), // two experts
    }
}

fn units(is_sharded: bool) -> Units {
    Units {
        experts: EXPERTS,
        classes: 1,
        bytes: vec![100, 100, 100, 100, 60, 30],
        gradients: if is_sharded { vec![10, 10, 10, 10, 6, 3] } else { vec![10, 10, 10, 10, 0, 0] },
        replayable: true,
        have_owners: is_sharded,
    }
}

/// The members on these nodes; each unit of a missing node trains on the next one that is left.
struct Cluster {
    nodes: Vec<usize>,
    ranks: Vec<RankInfo>,
    units: Vec<UnitInfo>,
}

impl Cluster {
    fn new(nodes: &[usize], is_sharded: bool, free_bytes: u64) -> Self {
        let rank_of = |node: usize| {
            let is_next = |&(_, each): &(usize, &usize)| *each >= node;
            nodes.iter().enumerate().find(is_next).map_or(0, |(rank, _)| rank)
        };
        let trained = [0, 0, 1, 2, 0, 1];
        let sizes = units(is_sharded);
        let unit = |unit: usize| UnitInfo {
            state_bytes: sizes.bytes[unit],
            gradient_bytes: sizes.gradients[unit],
            active: if unit < EXPERTS || is_sharded {
                vec![rank_of(trained[unit])]
            } else {
                (0..nodes.len()).collect()
            },
            tokens: COUNTS.get(unit).map_or(100.0, |&tokens| tokens as f64),
            replayable: unit < EXPERTS || is_sharded,
            may_lag: unit < EXPERTS,
        };
        let rank = |node: &usize| RankInfo {
            node: format!("node {node}"),
            free_bytes,
            trains: true,
            step_seconds: Some(1.0),
            network_seconds: Some(0.5),
            log_bytes: 1 << 20,
            link: Some(Link { alpha: 0.0, beta: 1000.0 }),
            host_speed: None,
        };
        Self {
            nodes: nodes.to_vec(),
            ranks: nodes.iter().map(rank).collect(),
            units: (0..6).map(unit).collect(),
        }
    }

    fn members(&self) -> Members<'_> {
        Members { nodes: &self.nodes, ranks: &self.ranks, units: &self.units }
    }
}

/// Half of a second of two is idle; `bytes` pass in it.
fn network(bytes: f64) -> Network {
    Network { link: Link { alpha: 0.0, beta: 2.0 * bytes }, layers: 1, step_seconds: 1.0, idle: 0.5 }
}

fn name(unit: usize) -> String {
    if unit < EXPERTS { format!("e{unit}") } else { format!("d{}", unit - EXPERTS) }
}

/// Copies with their versions, as `e0>1@3`: expert 0 on node 1, of the third step. `=` for snapshots of a node's own units.
fn held(engine: &Engine) -> String {
    let Some(copies) = engine.copies() else { return "none".into() };
    let found: Vec<String> = copies
        .units
        .iter()
        .enumerate()
        .map(|(unit, each)| {
            let version = step_of(copies.version(unit, engine.history()));
            let on = |nodes: &[usize]| nodes.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
            let mut text = name(unit);
            if !each.holders.is_empty() {
                write!(text, ">{}@{version}", on(&each.holders)).unwrap();
            }
            if !each.own.is_empty() {
                write!(text, "={}", on(&each.own)).unwrap();
            }
            text
        })
        .collect();
    found.join(" ")
}

fn step(engine: &mut Engine, generation: u64, number: u64) -> String {
    let followed = engine.begin_step().unwrap().map(|chosen| format!(" follows {:?}", chosen[0]));
    let made = engine.take_step(version_of(generation, number), || COUNTS.to_vec()).unwrap();
    let mut text = format!("{} to peers, {} to the store", made.peer_bytes, made.store_bytes);
    if made.store_bytes > 0 {
        engine.end_save(true);
    }
    text += &followed.filter(|_| made.peer_bytes > 0).unwrap_or_default();
    text
}

fn memory(engine: &Engine) -> String {
    let bytes = engine.host_bytes();
    (0..3).map(|node| bytes.get(&node).copied().unwrap_or(0).to_string()).collect::<Vec<_>>().join(" ")
}

fn first(planned: &Planned) -> u64 {
    planned.first.values().sum()
}

fn text_of(pace: &Pace) -> String {
    let windows = pace.window_steps.map_or("none".into(), |steps| steps.to_string());
    let (bytes, steps, delay) = (pace.bytes, pace.version_steps, pace.delay_seconds);
    format!("{bytes} bytes a step, a version in {steps}, in windows alone in {windows}, delay {delay:.3} s")
}

/// One life of a job, a line for each event.
fn life(preset: PresetName, is_sharded: bool) -> String {
    let mut engine = Engine::new(options(preset), units(is_sharded)).unwrap();
    let mut lines = String::new();
    let cluster = |nodes: &[usize]| Cluster::new(nodes, is_sharded, 1 << 20);
    let three = cluster(&[0, 1, 2]);
    let planned = engine.plan(&three.members(), 0).unwrap();
    writeln!(lines, "first: {} bytes, memory {}", first(&planned), memory(&engine)).unwrap();
    engine.resume(0).unwrap();
    writeln!(lines, "copies: {}", held(&engine)).unwrap();
    let pace = engine.pace(&network(1e6)).unwrap();
    writeln!(lines, "pace: {}", text_of(&pace)).unwrap();
    for number in 1..=4 {
        let made = step(&mut engine, 0, number);
        writeln!(lines, "step {number}: {made}; {}", held(&engine)).unwrap();
    }
    let pace = engine.pace(&network(100.0)).unwrap();
    writeln!(lines, "short windows: {}", text_of(&pace)).unwrap();
    for number in 5..=6 {
        step(&mut engine, 0, number);
    }
    writeln!(lines, "step 6: {}", held(&engine)).unwrap();

    // Node 0 is lost; the others continue from what is left, experts 0 and 1 on node 1.
    let left = left(&engine, &[1, 2]);
    let text = |(unit, version): (usize, &Option<u64>)| match version {
        Some(version) => format!("{}@{}", name(unit), step_of(*version)),
        None => format!("{} lost", name(unit)),
    };
    let text: Vec<String> = left.iter().enumerate().map(text).collect();
    writeln!(lines, "without node 0: {}", text.join(" ")).unwrap();
    let is_stale = |&(_, version): &(usize, u64)| step_of(version) < 6;
    let stale: Vec<(usize, u64)> =
        (0..EXPERTS).filter_map(|unit| left[unit].map(|version| (unit, version))).filter(is_stale).collect();
    engine.restore(version_of(0, 6));
    let lost = engine.lose(&stale).unwrap();
    writeln!(lines, "lost tokens: {}", lost.map_or("not counted".into(), |lost| lost.to_string())).unwrap();
    let two = cluster(&[1, 2]);
    let planned = engine.plan(&two.members(), version_of(0, 6)).unwrap();
    writeln!(lines, "loss: {} bytes, memory {}", first(&planned), memory(&engine)).unwrap();
    engine.pace(&network(1e6)).unwrap();
    engine.resume(version_of(0, 6)).unwrap();
    writeln!(lines, "until they are complete: {}", held(&engine)).unwrap();
    let made = step(&mut engine, 1, 7);
    writeln!(lines, "step 7: {made}; {}", held(&engine)).unwrap();

    // Node 0 joins again.
    engine.restore(version_of(1, 7));
    let planned = engine.plan(&three.members(), version_of(1, 7)).unwrap();
    writeln!(lines, "join: {} bytes, memory {}", first(&planned), memory(&engine)).unwrap();
    engine.resume(version_of(1, 7)).unwrap();
    lines
}

/// The newest version of each unit that is left on these nodes, as it is trained, in copies or in the store.
fn left(engine: &Engine, nodes: &[usize]) -> Vec<Option<u64>> {
    let (trained, owned) = ([0, 0, 1, 2, 0, 1], engine.units().owned());
    let newest = |unit: usize| {
        let is_everywhere = unit >= EXPERTS && !owned.contains(&unit);
        (is_everywhere || nodes.contains(&trained[unit])).then_some(engine.history().newest)
    };
    let mut found: Vec<Option<u64>> = (0..6).map(newest).collect();
    for (unit, node, version, _) in engine.copies().unwrap().held(engine.history()) {
        if nodes.contains(&node) {
            found[unit] = found[unit].max(Some(version));
        }
    }
    for (unit, version) in engine.saved() {
        found[unit] = found[unit].max(Some(version));
    }
    found
}

#[test]
fn presets_do_to_a_step_what_the_table_says() {
    let mut found = String::new();
    for preset in PresetName::ALL {
        for is_sharded in [false, true] {
            let dense = if is_sharded { "sharded" } else { "replicated" };
            write!(found, "## {}, {dense}\n{}\n", preset.name(), life(preset, is_sharded)).unwrap();
        }
    }
    let wanted = include_str!("table.txt");
    let differs = found.lines().zip(wanted.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        found == wanted,
        "tests/engine/table.txt differs, first in {differs:?}; all of it is now:\n{found}"
    );
}
