//! The commit protocol: how members agree who takes part, which step is taken, and from where all go on after a failure.
//!
//! ```text
//!              ┌──────────────── Lost, in any phase: Drop ◄─────────────────┐
//!              ▼                                                            │
//! Look ─ Ask ─ Quorum ─ Connect ─ Recall ─ (Take) ─ Restore ─ CountLosses ─ Protect ─ Resume
//!  ▲ │          └ Wait, Withdraw, Stop                                                  │
//!  │ └ intact: (Inquire) ─ (Ask, Compare) ─ (Weigh) ────────────────────────────────┐   │
//!  │                                                                                ▼   ▼
//!  └──────────────────────────────── Commit ◄─ Take ◄─ Tally ◄─ Vote ◄─ Gradients ◄─ Step
//! ```
//!
//! [`Protocol`] is pure: [`Event`]s in, [`Command`]s out; no clock, no I/O. Its drivers, the session and the pipeline's
//! session, carry out the commands. `tests/protocol_*.rs` explore what several members can reach with crashes, freezes
//! and a late Lighthouse, and every test with real processes replays what its members have recorded.
//!
//! **Vote before update.** A step is taken once all members have said that their gradients and copies are whole. Who
//! loses a peer in the vote does not know the result, so the members recall the votes that have passed before they
//! compare states: either nobody has taken the step, or all that could take it do.
//!
//! **Commit one vote later.** A member that reports a step at once and dies may be the only one that knew: the others, in
//! doubt, repeat it. So a step is reported as committed when the next vote passes: all members have voted, so all have
//! taken the step, and the copies of its state are whole. The last step has a round of its own.
//!
//! **Copies beside the next step.** After a recovery the copies that are missing may be made while the next step
//! computes. Its vote says that they are whole; until then all copies of before stay, and no step is reported. Where the
//! recovery gave the state another version than those copies have, training waits.
//!
//! **Nobody goes on beside others.** Members that cannot reach each other tell so when they ask. All compute from that
//! the same set that reaches itself and has the newest state; the others withdraw until they reach it, and it waits until the Lighthouse
//! names it alone: nothing ever happens under a set without all of its members.
//!
//! **Several Lighthouses may name several sets.** A cut may leave a Lighthouse on each side. Then only the set goes on that
//! holds a majority of the last group, or half of it with its lowest id, whichever Lighthouse names it; all others wait,
//! and ask one Lighthouse after the other, until a majority is together or the operator says who goes on.
//!
//! **A group that is whole waits for nobody else.** Its members ask the Lighthouse beside training whether there are
//! newcomers, and nobody acts on such an answer: the vote tells all that one of them has heard of some. Then they ask
//! together, between two steps, and compare what they have heard: unless all have heard the same, they go on as they are.
//!
//! **Versions only grow.** A version is a generation and a step. Every agreement has a larger generation than any of its
//! members had, and consecutive agreements share a member or hold all members of the last one (see [`judge`]), so no
//! version is given to two different states.

mod agreement;
mod cut;
mod event;
mod majority;
mod member;
mod message;
mod version;

pub use agreement::{Agreement, Need, Verdict, judge, without_idle_spares};
pub use cut::reach_each_other;
pub use event::{Begun, Command, Event, Participant, Passed, Seat, Standing, Stop, Wait};
pub use member::{MAX_RECOVERIES, Protocol, Settings};
pub use message::{Heard, Message, PROTOCOL, Role, hear, promote, tell, tell_ended};
pub use version::{STEP_BITS, generation_of, step_of, version_of};
