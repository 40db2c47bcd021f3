/* The rounds of a group (flowchan/_core/group.hpp). Either all survivors complete an operation or none of them does,
   and no member reads overwritten data. The model covers what members publish and how they wait, but not what they
   compute.

   An operation has ROUNDS rounds. In each round, a member writes the data that it shows to the others. In an
   exchange, this is its input. With slices, it is also its part of the result of the previous round. The member then
   publishes the number of the round, waits until all other members have published it, and reads their data. Cells and
   their data exist twice, for odd and even rounds. A member may die before any step, or may stop waiting because of a
   timeout or Ctrl-C. Another thread of its process may close it at any time. It then stops waiting, or does not begin
   another operation. A sleep may end at any time, and the member then checks again. A lost wake-up costs only a slice
   of time, so sleeping is not a step of this model.

   DIRECT: in the first round, a member shows an address in its own memory. Once the operation has ended for the
   member, its program may reuse that memory. The other members read from it, and afterwards check whether its owner
   has given up. In the second round, each member shows whether its reads succeeded. Unless all succeeded, one more
   round shows the data next to the cells.

   step of the model                     source
   -----------------------------------   ------------------------------------------------------------------
   write()                               group_ops.cpp: Member::show, Member::exchange, Member::slices
   publish()                             group.cpp: Member::publish
   is_here()                             group.cpp: Member::has_arrived, Member::await_all, Member::await
   is_lost()                             group.cpp: Member::any_is_lost, Member::see
   another round                         group_ops.cpp: Member::next
   giving up                             group.cpp: Member::finish, Member::give_up
   closing                               group.cpp: Member::leave, Member::retire, Member::finish
   reading another one's memory          group_ops.cpp: Member::pull
   saying who could                      group_ops.cpp: Member::have_read

   Planted faults: PLANT_one_cell (one cell for all rounds), PLANT_early (the round is published before its data is
   written), PLANT_no_second_look (the number of a member that has gone is not read again), PLANT_any_number (a later
   number also counts, and so does an earlier one in the same cell), PLANT_goes_on (a member that has given up takes
   part in the next operation), PLANT_silent (a member gives up without reporting it), PLANT_at_once (a closed member
   is gone before its operation has ended), PLANT_trusts (readers do not check whether the owner has given up),
   PLANT_returns (a member that has read does not wait for the others to read). */

#ifndef MEMBERS
#define MEMBERS 3
#endif
#ifndef OPERATIONS
#define OPERATIONS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef CLOSES
#define CLOSES 0
#endif

#ifdef PLANT_one_cell
#define CELL(r) 0
#else
#define CELL(r) ((r) & 1)
#endif
#define AT(member, r) ((member) * 2 + CELL(r))

#ifdef DIRECT
byte memory[MEMBERS];         /* the operation for which the memory is in use */
bool couldnt[MEMBERS * 2];    /* shown next to the number */
#endif

byte number[MEMBERS * 2]; /* the round published in each cell */
byte shows[MEMBERS * 2];  /* the round whose data is next to the cell */
bool gone[MEMBERS];       /* the member has reported that it gave up */
bool dead[MEMBERS];
bool stopped[MEMBERS];    /* a timeout, Ctrl-C or close stopped it */
bool closing[MEMBERS];    /* another thread of its process closes it */
byte done[MEMBERS];       /* how many operations it has completed */
byte deaths, stops, ended;

#ifdef PLANT_any_number
#define is_here(other, r) (number[AT(other, r)] >= (r) || ((r) > 2 && number[AT(other, r)] == (r) - 2))
#else
#define is_here(other, r) (number[AT(other, r)] == (r))
#endif

#define is_lost(other) (gone[other] || dead[other])

#define may_die if :: atomic { deaths < DEATHS -> deaths++; dead[me] = true; goto end } :: true fi

inline write(r) { shows[AT(me, r)] = r }
inline publish(r) { number[AT(me, r)] = r }

proctype member(byte me) {
    byte r = 1, operation = 1, step = 1, i, other;
    bool failed = false;
#ifdef DIRECT
    bool could = true, right = true;
#endif
    do
    :: operation > OPERATIONS -> break
    :: step == 1 && closing[me] -> gone[me] = true; goto end
    :: operation <= OPERATIONS && !(step == 1 && closing[me]) ->
#ifdef DIRECT
        if
        :: step == 1 -> memory[me] = operation; could = true; right = true
        :: else
        fi;
        couldnt[AT(me, r)] = (step == 2 && !could);
#endif
        may_die;
#ifdef PLANT_early
        publish(r);
        may_die;
        write(r);
#else
        write(r);
        may_die;
        publish(r);
#endif
        may_die;
#ifdef PLANT_returns
        if
        :: step == 2 && could -> memory[me] = 0
        :: else
        fi;
#endif
        i = 1;
        do
        :: i == MEMBERS -> break
        :: i < MEMBERS ->
            other = (me + i) % MEMBERS;
            do
            :: is_here(other, r) -> break
            :: !is_here(other, r) ->
                if
                :: is_here(other, r) -> break
                :: is_lost(other) ->
#ifndef PLANT_no_second_look
                    if
                    :: is_here(other, r) -> skip
                    :: else -> failed = true; break
                    fi
#else
                    failed = true; break
#endif
                fi
            :: closing[me] && !is_here(other, r) -> failed = true; break
            :: atomic { stops < STOPS && !is_here(other, r) -> stops++; stopped[me] = true; failed = true }; break
            od;
            if
            :: failed -> break
            :: else -> may_die; i++
            fi
        od;
        if
        :: failed ->
#ifndef PLANT_silent
            gone[me] = true;
#endif
#ifdef DIRECT
            memory[me] = 0;
#endif
#ifdef PLANT_goes_on
            r = r + ROUNDS - step + 1; step = 1; operation++; failed = false; goto next
#else
            goto end
#endif
        :: else
        fi;
        i = 0;
        do /* read what the members show */
        :: i == MEMBERS -> break
        :: i < MEMBERS ->
            assert(shows[AT(i, r)] == r);
            i++
        od;
#ifdef DIRECT
        i = 0;
        do /* first round: read their memory; second round: learn whether all could read */
        :: i == MEMBERS || step > 2 -> break
        :: i < MEMBERS && step == 2 -> could = could && !couldnt[AT(i, r)]; i++
        :: i < MEMBERS && step == 1 ->
            if
            :: dead[i] -> could = false
            :: !dead[i] -> right = right && memory[i] == operation
            fi;
#ifndef PLANT_trusts
            could = could && !gone[i];
#endif
            i++
        od;
        if
        :: step == ROUNDS && could -> assert(right); goto complete
        :: step > ROUNDS -> goto complete
        :: else -> r++; step++; goto next
        fi;
complete:
        memory[me] = 0;
#else
        if
        :: step < ROUNDS -> r++; step++; goto next
        :: else
        fi;
#endif
        done[me] = operation;
        r++;
        operation++;
        step = 1;
next:   skip
    od;
end:
    ended++
}

#if CLOSES
/* Another thread in the process of one member. */
active proctype closer() {
    byte who;
    select(who : 0 .. MEMBERS - 1);
    atomic {
        closing[who] = true;
        stopped[who] = true;
#ifdef PLANT_at_once
        gone[who] = true
#endif
    }
}
#endif

init {
    byte i = 0, j;
    atomic {
        do
        :: i < MEMBERS -> run member(i); i++
        :: else -> break
        od
    };
    ended == MEMBERS; /* if this is never true, a member waits forever */
    i = 0;
    do
    :: i < MEMBERS ->
        j = 0;
        do
        :: j < MEMBERS ->
            assert(dead[i] || dead[j] || stopped[i] || stopped[j] || done[i] == done[j]);
            j++
        :: else -> break
        od;
        i++
    :: else -> break
    od
}
