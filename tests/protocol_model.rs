//! The commit protocol, in every state that a few members, a Lighthouse, crashes and freezes can reach.

mod world;

use stateright::{Checker, CheckerBuilder, Model, Property, UniformChooser};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;
use world::{Action, Keeper, Mistake, Setting, World};

struct Job(Setting);

impl Model for Job {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.0)]
    }

    fn actions(&self, world: &World, found: &mut Vec<Action>) {
        world.actions(&self.0, found);
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        Some(world.after(action, &self.0))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no rule is broken", |_, world: &World| world.broken.is_none()),
            Property::always("one state per version", |_, world: &World| world.states_agree()),
            Property::always("a majority finishes", |job: &Job, world: &World| {
                !is_sampled(world) || !world.can_continue() || world.finishes(&job.0)
            }),
            Property::sometimes("newcomers get in", |job: &Job, world: &World| {
                job.0.joiners == 0 || world.nodes.iter().all(|node| node.protocol.is_established())
            }),
            Property::sometimes("the job is finished", |job: &Job, world: &World| {
                world.is_finished() && world.committed_steps() == job.0.steps
            }),
        ]
    }
}

/// One of this number of states is run to its end.
const SAMPLED: u64 = 64;

fn is_sampled(world: &World) -> bool {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish().is_multiple_of(SAMPLED)
}

fn setting(members: usize, steps: u64, faults: u8, keeper: Keeper) -> Setting {
    Setting {
        members,
        island_size: None,
        joiners: 0,
        steps,
        faults,
        lighthouses: 1,
        silences: 0,
        moves: 0,
        has_spare: false,
        inquiries: 0,
        leaves: 0,
        cuts: 0,
        keeper,
        mistake: None,
    }
}

/// Explores everything within the bounds, and prints the number of states.
fn explore(setting: &Setting) {
    let began = std::time::Instant::now();
    let checker = Job(setting.clone()).checker().threads(2).spawn_dfs().join();
    println!("{setting:?}: {} states, {:.0?}", checker.unique_state_count(), began.elapsed());
    if let Some((rule, path)) = broken(&checker) {
        panic!("{setting:?}: {rule} after {path:?}");
    }
    checker.assert_properties();
}

/// The first rule that was found broken, with the actions that led to it.
fn broken(checker: &impl Checker<Job>) -> Option<(String, Vec<Action>)> {
    for rule in ["no rule is broken", "one state per version", "a majority finishes"] {
        if let Some(path) = checker.discovery(rule) {
            let rule = path.last_state().broken.unwrap_or(rule);
            return Some((rule.to_owned(), path.into_actions()));
        }
    }
    None
}

const KEEPERS: [Keeper; 2] = [Keeper::Replicas, Keeper::Snapshots];

#[test]
fn two_members_to_three_versions_with_two_faults() {
    for keeper in KEEPERS {
        explore(&setting(2, 3, 2, keeper));
    }
}

/// A version of the copies takes two steps: steps are committed once a version that contains them is complete. The engine
/// says when a version begins, which vote waits for it, and by how much the complete ones lag.
#[test]
fn two_members_whose_copies_take_two_steps() {
    explore(&setting(2, 4, 1, Keeper::SlowSnapshots));
    explore(&Setting { leaves: 1, ..setting(2, 4, 1, Keeper::SlowSnapshots) });
}

#[test]
fn two_members_whose_lighthouse_is_silent_at_times() {
    for keeper in KEEPERS {
        explore(&Setting { silences: 1, inquiries: 2, ..setting(2, 2, 1, keeper) });
    }
}

#[test]
fn two_members_with_two_lighthouses() {
    for keeper in KEEPERS {
        explore(&Setting { lighthouses: 2, silences: 1, moves: 1, ..setting(2, 2, 1, keeper) });
    }
}

#[test]
#[ignore = "takes most of a minute"]
fn two_members_with_two_lighthouses_that_are_silent_twice() {
    for keeper in KEEPERS {
        explore(&Setting { lighthouses: 2, silences: 2, moves: 1, ..setting(2, 2, 1, keeper) });
    }
}

#[test]
fn two_members_with_two_lighthouses_that_leave_on_notice() {
    for keeper in KEEPERS {
        explore(&Setting { lighthouses: 2, silences: 1, leaves: 1, ..setting(2, 2, 1, keeper) });
    }
}

/// Everything within these bounds; in `make test-long`.
#[test]
#[ignore = "takes minutes and gigabytes"]
fn two_members_with_two_lighthouses_that_leave_on_notice_and_move() {
    for keeper in KEEPERS {
        explore(&Setting { lighthouses: 2, silences: 2, moves: 1, leaves: 1, ..setting(2, 2, 1, keeper) });
    }
}

#[test]
fn two_members_that_do_not_reach_each_other() {
    for keeper in KEEPERS {
        explore(&Setting { cuts: 1, ..setting(2, 2, 1, keeper) });
    }
}

#[test]
fn two_members_that_leave_on_notice() {
    for keeper in KEEPERS {
        explore(&Setting { leaves: 2, ..setting(2, 3, 1, keeper) });
    }
}

#[test]
fn two_members_and_a_newcomer() {
    with_another(Keeper::Replicas, false);
}

#[test]
fn two_members_and_a_spare() {
    with_another(Keeper::Replicas, true);
}

/// In `make test-long`.
#[test]
#[ignore = "takes half a minute"]
fn two_members_and_another_without_replicas() {
    for has_spare in [false, true] {
        with_another(Keeper::Snapshots, has_spare);
    }
}

/// Another process joins two members: to train, or as a spare.
fn with_another(keeper: Keeper, has_spare: bool) {
    explore(&Setting { joiners: 1, has_spare, inquiries: 1, ..setting(2, 2, 1, keeper) });
}

#[test]
#[ignore = "takes three minutes"]
fn two_members_that_inquire_twice_and_a_newcomer() {
    for keeper in KEEPERS {
        explore(&Setting { joiners: 1, inquiries: 2, ..setting(2, 2, 1, keeper) });
    }
}

/// Everything within these bounds; in `make test-long`.
#[test]
#[ignore = "takes minutes and gigabytes"]
fn three_members_to_two_versions() {
    for keeper in KEEPERS {
        explore(&setting(3, 2, 2, keeper));
    }
}

/// Two islands of two processes each, or three islands of one.
fn islands(size: usize, members: usize, steps: u64, faults: u8, keeper: Keeper) -> Setting {
    Setting { island_size: Some(size), ..setting(members, steps, faults, keeper) }
}

#[test]
fn two_islands_of_two() {
    for keeper in KEEPERS {
        explore(&islands(2, 4, 1, 1, keeper));
    }
}

#[test]
fn an_island_and_another_that_starts_later() {
    for keeper in KEEPERS {
        explore(&Setting { joiners: 2, inquiries: 1, ..islands(2, 2, 1, 0, keeper) });
    }
}

/// Everything within these bounds; in `make test-long`.
#[test]
#[ignore = "takes minutes and gigabytes"]
fn two_islands_of_two_that_inquire_or_do_not_reach_each_other() {
    for keeper in KEEPERS {
        explore(&Setting { inquiries: 1, ..islands(2, 4, 1, 1, keeper) });
        explore(&Setting { cuts: 1, ..islands(2, 4, 1, 0, keeper) });
    }
}

/// Random runs of two islands with two faults.
#[test]
fn two_islands_at_random() {
    for keeper in KEEPERS {
        let more = Setting { inquiries: 4, silences: 1, cuts: 1, ..islands(2, 4, 2, 2, keeper) };
        walk_in(&more, 3, 1);
    }
}

#[test]
#[ignore = "takes half a minute"]
fn islands_that_are_not_reported_are_found() {
    let more = islands(2, 4, 1, 1, Keeper::Replicas);
    let checker =
        plant(Mistake::HalfIslands, more).threads(2).timeout(Duration::from_secs(300)).spawn_dfs().join();
    report(Mistake::HalfIslands, Keeper::Replicas, &checker);
}

#[test]
fn islands_of_one_and_one_island_of_three() {
    for keeper in KEEPERS {
        explore(&islands(1, 3, 1, 1, keeper));
        explore(&islands(3, 3, 1, 1, keeper));
    }
}

/// Random runs of three members with two faults and a newcomer, or two Lighthouses; `make test-long` makes many more.
fn walk(seconds: u64, seed: u64) {
    for (keeper, lighthouses) in KEEPERS.into_iter().flat_map(|keeper| [(keeper, 1), (keeper, 2)]) {
        let more = match lighthouses {
            1 => Setting { joiners: 1, inquiries: 4, silences: 1, ..setting(3, 2, 2, keeper) },
            _ => Setting { lighthouses, moves: 6, inquiries: 2, silences: 3, ..setting(3, 2, 2, keeper) },
        };
        walk_in(&Setting { leaves: 1, cuts: 1, ..more }, seconds, seed);
    }
}

fn walk_in(setting: &Setting, seconds: u64, seed: u64) {
    let checker = Job(setting.clone()).checker().timeout(Duration::from_secs(seconds));
    let checker = checker.spawn_simulation(seed, UniformChooser).join();
    println!("{setting:?}: {} states in random runs from seed {seed}", checker.state_count());
    if let Some((rule, path)) = broken(&checker) {
        panic!("{setting:?}, seed {seed}: {rule} after {path:?}");
    }
}

#[test]
fn three_members_at_random() {
    walk(3, 1);
}

#[test]
#[ignore = "takes ten minutes"]
fn three_members_at_random_for_long() {
    walk(150, 2);
}

/// The checker finds planted mistakes.
#[test]
fn mistakes_are_found() {
    let mistakes = [
        (Mistake::VoteSkipped, Keeper::Snapshots),
        (Mistake::GenerationNotRaised, Keeper::Replicas),
        (Mistake::ReportedEarly, Keeper::Replicas),
        (Mistake::ReportedEarly, Keeper::Snapshots),
        (Mistake::SleepForgotten, Keeper::Replicas),
        (Mistake::MinorityContinues, Keeper::Replicas),
        (Mistake::LagForgotten, Keeper::SlowSnapshots),
    ];
    for (mistake, keeper) in mistakes {
        let of_two = mistake == Mistake::MinorityContinues;
        let more = Setting {
            lighthouses: 1 + usize::from(of_two),
            silences: u8::from(of_two),
            ..setting(2, 3, 2, keeper)
        };
        let checker = plant(mistake, more).threads(2).timeout(Duration::from_secs(120)).spawn_bfs().join();
        report(mistake, keeper, &checker);
    }
}

/// In `make test-long`.
#[test]
#[ignore = "takes half a minute"]
fn leavers_that_count_are_found() {
    let more = Setting { lighthouses: 2, silences: 1, leaves: 1, ..setting(2, 3, 2, Keeper::Replicas) };
    let checker =
        plant(Mistake::LeaverCounts, more).threads(2).timeout(Duration::from_secs(120)).spawn_bfs().join();
    report(Mistake::LeaverCounts, Keeper::Replicas, &checker);
}

/// A newcomer changes the holders after two votes, late in a run. In `make test-long`.
#[test]
#[ignore = "takes two minutes"]
fn copies_that_are_given_up_early_are_found() {
    for keeper in KEEPERS {
        let more = Setting { joiners: 1, inquiries: 2, ..setting(2, 3, 1, keeper) };
        let checker = plant(Mistake::GivenUpEarly, more).threads(2).timeout(Duration::from_secs(600));
        report(Mistake::GivenUpEarly, keeper, &checker.spawn_dfs().join());
    }
}

fn plant(mistake: Mistake, setting: Setting) -> CheckerBuilder<Job> {
    Job(Setting { mistake: Some(mistake), ..setting }).checker()
}

fn report(mistake: Mistake, keeper: Keeper, checker: &impl Checker<Job>) {
    let (rule, path) = broken(checker).unwrap_or_else(|| panic!("{mistake:?} with {keeper:?} was not found"));
    println!("{mistake:?} with {keeper:?}: {rule} after {} actions: {path:?}", path.len());
}
