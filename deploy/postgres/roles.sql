-- One role per service with its own schema only, one that migrates and owns everything, one that
-- looks. Run once by an administrator, before `lbledger migrate`:
--
--   psql "$ADMIN_URL" -v ON_ERROR_STOP=1 -f deploy/postgres/roles.sql
--
-- Then give each its password (\password lbledger_allocator ...) and run `lbledger migrate` as
-- lbledger_owner. Tables of later migrations are covered by the default privileges below.

create role lbledger_owner login;
create role lbledger_allocator login;
create role lbledger_prober login;
create role lbledger_nrp_sync login;
create role lbledger_applier login;
create role lbledger_reader login;

create extension if not exists btree_gist;
grant create on schema public to lbledger_owner;

do $$
declare service text;
begin
  execute format('grant create on database %I to lbledger_owner', current_database());
  execute format('revoke temporary on database %I from public', current_database());
  foreach service in array array['allocator', 'prober', 'nrp_sync', 'applier'] loop
    execute format('create schema if not exists %I authorization lbledger_owner', service);
    execute format('grant usage on schema %I to %I, lbledger_reader', service, 'lbledger_' || service);
    execute format('alter default privileges for role lbledger_owner in schema %I '
      'grant select, insert, update, delete on tables to %I', service, 'lbledger_' || service);
    execute format('alter default privileges for role lbledger_owner in schema %I '
      'grant usage, select, update on sequences to %I', service, 'lbledger_' || service);
    execute format('alter default privileges for role lbledger_owner in schema %I '
      'grant select on tables to lbledger_reader', service);
  end loop;
end $$;

-- Every service looks at the revision before it starts.
alter default privileges for role lbledger_owner in schema public
  grant select on tables to lbledger_allocator, lbledger_prober, lbledger_nrp_sync,
                            lbledger_applier, lbledger_reader;
